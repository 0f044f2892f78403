"""A message that kills its consumers is found, kept whole and listed; its neighbours are not blamed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.dead_letters import (
    DeadLetters,
    Poison,
    quarantine_of,
    read_dead_letters,
    read_quarantined,
)
from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.poison import Suspects, Victim
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.bus import DeadlineExceeded, Link, RemoteError
from cosmos_actor.bus.liveness import Liveness
from cosmos_actor.bus.schema import Array, array, schema
from tests.actors.small_cluster import Answer, Question, SmallCluster


@schema("test_load", version=1)
class Load:
    """A question that is heavy."""

    number: int
    values: Array = array("float32", "N")


@schema("test_unserved", version=1)
class Unserved:
    number: int


class DeadlyRole(Role):
    """The numbers in `deadly` kill it: it says so and never answers; the rest wait until `gate` is open."""

    name = "echo"
    deadly: frozenset[int] = frozenset()
    gate: asyncio.Event
    dying: list[int]
    beside: list[int]

    @handles(Question, concurrency=8)
    async def question(self, question: Question) -> Answer:
        return await self._answer(question.number)

    @handles(Load, concurrency=8)
    async def load(self, load: Load) -> Answer:
        return await self._answer(load.number)

    async def _answer(self, number: int) -> Answer:
        if number < 0:
            raise ValueError("a negative number")
        self.beside.append(number)
        if number in self.deadly:
            self.dying.append(number)
            await asyncio.Event().wait()
        await self.gate.wait()
        self.beside.remove(number)
        return Answer(number, self.context.identity.actor)


class Deadly:
    """A cluster whose actor `echo-0` dies of some numbers and is started again, as a supervisor would do it."""

    def __init__(self, folder: Path, deadly: set[int], *, stateful: bool = False) -> None:
        self.paths = RunPaths(folder)
        self.cluster = SmallCluster(stateful=frozenset({"echo"} if stateful else ()), poison_deaths=2,
                                    letters=DeadLetters(self.paths, lambda: 5.0))
        self.deadly = frozenset(deadly)
        self.deaths: list[list[int]] = []
        """For each death, what was with the actor."""
        self.closing: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.dying: list[int] = []
        self.beside: list[int] = []
        members = {"deadly": self.deadly, "gate": self.gate, "dying": self.dying, "beside": self.beside}
        await self.cluster.add("echo-0", type("Mortal", (DeadlyRole,), members))

    async def supervise(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            if self.dying:
                await asyncio.sleep(0.02)  # what else was given to it is there by now
                self.deaths.append(sorted(self.beside))
                dead = self.cluster.actors["echo-0"]
                self.cluster.crash("echo-0")
                await self.start()
                self.closing.append(asyncio.ensure_future(dead.close()))


def with_deadly(made: Deadly, test: Any) -> None:
    async def run() -> None:
        await made.cluster.open()
        await made.start()
        await made.cluster.fleet.wait_for_members("echo", 1, 5.0)
        supervisor = asyncio.ensure_future(made.supervise())
        try:
            await asyncio.wait_for(test(made.cluster), 30.0)
        finally:
            supervisor.cancel()
            made.gate.set()
            await asyncio.gather(*made.closing)
            await made.cluster.close()

    asyncio.run(run())


async def outcomes(cluster: SmallCluster, *numbers: int) -> list[Any]:
    return await asyncio.gather(*(cluster.ask(number, deadline_s=10.0) for number in numbers), return_exceptions=True)


# ---- the pure core


def test_work_is_guilty_when_enough_processes_died_of_it():
    suspects = Suspects(2)
    assert not suspects.suspected("w")
    for number in (1, 2):
        assert not suspects.guilty("w")
        suspects.died(f"i{number}", "killed by SIGKILL", supervised=True)
        suspects.lost("w", "reward-0", f"i{number}")
        assert suspects.suspected("w")
    assert suspects.guilty("w")
    assert suspects.victims("w") == (Victim("reward-0", "i1", "killed by SIGKILL"),
                                     Victim("reward-0", "i2", "killed by SIGKILL"))
    suspects.cleared("w")
    assert not suspects.suspected("w") and not suspects.guilty("w")


@pytest.mark.parametrize(("reason", "supervised", "counts"), [
    ("killed by SIGSEGV", True, True), ("stuck: no heartbeat for 60.0 s", True, True),
    ("it said goodbye: closed", True, False), ("left: it said goodbye: closed", False, False), ("stopped", True, False),
    ("replaced by incarnation 5", True, False),
])
def test_only_the_end_of_a_process_counts(reason, supervised, counts):
    suspects = Suspects(1)
    suspects.died("i", reason, supervised=supervised)
    suspects.lost("w", "reward-0", "i")
    assert suspects.guilty("w") is counts


@pytest.mark.parametrize("supervised", [True, False])
def test_silence_counts_only_where_no_supervisor_knows_better(supervised):
    liveness = Liveness(0.0, interval_s=1.0, lost_after_s=5.0)
    for second in range(1, 8):
        liveness.look(float(second))
    reason = liveness.lost(7.0)
    suspects = Suspects(1)
    suspects.died("i", reason, supervised=supervised)
    suspects.lost("w", "reward-0", "i")
    assert suspects.guilty("w") is not supervised


def test_an_actor_that_was_not_reported_dead_is_no_victim():
    suspects = Suspects(1)
    suspects.lost("w", "reward-0", "i")
    assert suspects.suspected("w") and not suspects.guilty("w")


# ---- in a fleet


def test_what_kills_twice_is_in_quarantine_and_the_rest_is_answered(tmp_path):
    async def test(cluster: SmallCluster) -> None:
        found = await outcomes(cluster, *range(8))
        assert [answer.number for answer in found if not isinstance(answer, Exception)] == [0, 1, 2, 4, 5, 6, 7]
        assert isinstance(found[3], Poison)
        assert str(found[3]).startswith("question 3 killed 2 actors of role echo (echo-0: killed by SIGKILL; ")

    made = Deadly(tmp_path, {3})
    with_deadly(made, test)
    assert len(made.deaths) == 2 and made.deaths[1] == [3], "on trial nothing is beside it"
    [line] = read_dead_letters(made.paths)
    assert (line["kind"], line["role"], line["what"], line["message"]) == (
        "quarantined", "echo", "question 3", "test_question/1")
    assert [victim["actor"] for victim in line["killed"]] == ["echo-0", "echo-0"]
    assert len({victim["incarnation"] for victim in line["killed"]}) == 2
    assert read_quarantined(quarantine_of(made.paths) / f"{line['quarantine']}.msgpack") == Question(3)


def test_two_that_kill_are_both_found_and_no_neighbour_with_them(tmp_path):
    async def test(cluster: SmallCluster) -> None:
        found = await outcomes(cluster, *range(6))
        assert [isinstance(answer, Poison) for answer in found] == [False, True, True, False, False, False]

    made = Deadly(tmp_path, {1, 2})
    with_deadly(made, test)
    assert 3 <= len(made.deaths) <= 4
    assert {line["what"] for line in read_dead_letters(made.paths)} == {"question 1", "question 2"}


def test_a_message_that_kills_a_stateful_role_in_two_lives_ends_as_poison(tmp_path):
    async def test(cluster: SmallCluster) -> None:
        with pytest.raises(StateLost):
            await cluster.ask(3, deadline_s=10.0)
        cluster.fleet.state_is_fresh()
        assert (await cluster.ask(2, deadline_s=10.0)).number == 2
        with pytest.raises(StateLost):
            await cluster.ask(3, deadline_s=10.0)
        cluster.fleet.state_is_fresh()
        with pytest.raises(Poison, match="question 3 killed 2 actors of role echo"):
            await cluster.ask(3, deadline_s=10.0)

    made = Deadly(tmp_path, {3}, stateful=True)
    with_deadly(made, test)
    assert [line["kind"] for line in read_dead_letters(made.paths)] == ["quarantined"]


def test_a_link_that_breaks_again_and_again_makes_nothing_poison(tmp_path):
    async def test(cluster: SmallCluster) -> None:
        made.gate.clear()
        question = asyncio.ensure_future(cluster.ask(1, deadline_s=20.0))
        for _ in range(4):
            cluster.bus.link_over(await with_its_question(cluster), "no frame for 5.0 s")
        await with_its_question(cluster)
        made.gate.set()
        assert (await question).number == 1

    async def with_its_question(cluster: SmallCluster) -> Link:
        while not cluster.fleet.members("echo").get("echo-0", {}).get("in_flight"):
            await asyncio.sleep(0.002)
        return cluster.fleet.links("echo")["echo-0"]

    made = Deadly(tmp_path, set())
    with_deadly(made, test)
    assert read_dead_letters(made.paths) == []


def test_arrays_come_back_as_they_were(tmp_path):
    values = np.arange(1000, dtype=np.float32)

    async def test(cluster: SmallCluster) -> None:
        with pytest.raises(Poison):
            await cluster.fleet.submit("echo", Load(3, values), deadline_s=10.0, what="a load")

    made = Deadly(tmp_path, {3})
    with_deadly(made, test)
    [sidecar] = quarantine_of(made.paths).glob("*.json")
    facts = json.loads(sidecar.read_text())
    assert facts["problem"] is None and facts["schema"][:2] == ["test_load", 1] and len(facts["killed"]) == 2
    read = read_quarantined(quarantine_of(made.paths) / facts["payload"])
    assert read.number == 3 and np.array_equal(read.values, values) and read.values.dtype == np.float32


# ---- the other ends of work that nobody does


@pytest.mark.parametrize(("message", "deadline_s", "kind", "error"), [
    (Question(-1), 5.0, "failed", RemoteError), (Unserved(1), 5.0, "no consumer", RemoteError),
    (Question(7), 0.2, "deadline", DeadlineExceeded), (Load(1, "no array"), 5.0, "schema refused", Exception),
])
def test_every_other_end_is_listed_with_its_kind(tmp_path, message, deadline_s, kind, error):
    async def test(cluster: SmallCluster) -> None:
        made.gate.clear()
        with pytest.raises(error):
            await cluster.fleet.submit("echo", message, deadline_s=deadline_s, what="work")

    made = Deadly(tmp_path, set())
    with_deadly(made, test)
    [line] = read_dead_letters(made.paths)
    assert (line["kind"], line["what"], line["quarantine"]) == (kind, "work", None) and line["reason"]


def test_work_for_a_role_without_actors_has_no_consumer(tmp_path):
    async def test(cluster: SmallCluster) -> None:
        with pytest.raises(DeadlineExceeded):
            await cluster.fleet.submit("nobody", Question(1), deadline_s=0.05, what="work")

    made = Deadly(tmp_path, set())
    with_deadly(made, test)
    assert [line["kind"] for line in read_dead_letters(made.paths)] == ["no consumer"]


@pytest.mark.parametrize("damage", [
    b"", b"\x93\x02\xc4\x00\x90", b"not msgpack at all", b"\xc0", b"\x93\x01\xc4\x00\x90"])
def test_a_damaged_file_is_one_line(tmp_path, damage):
    path = tmp_path / "0001-echo-test_load.msgpack"
    path.write_bytes(damage)
    with pytest.raises(NotFound, match="can not be read as a quarantined message"):
        read_quarantined(path)
