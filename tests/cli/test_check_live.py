"""`check --live`: an edge is up when both of its ends say so; asked from real actors over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.context import SystemClock
from cosmos_actor.actors.fleet import Fleet
from cosmos_actor.actors.messages import LinkReport, plain
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.actors.worker import InlineWorker
from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, new_incarnation
from cosmos_actor.cli.examination.edges import Edge, edges, wanted_edges
from cosmos_actor.recipes.plan import plan
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import resolved_text
from tests.actors.small_cluster import EchoRole
from tests.cli import heads
from tests.cli.conftest import Cli
from tests.cli.sample_run import make_run
from tests.job.runs import Run
from tests.waiting import eventually, stop

# -- the rule, without sockets -----------------------------------------------------------------------------------------


def link(actor: str, **facts: Any) -> LinkReport:
    known = {"role": actor.split("-")[0], "incarnation": "1", "up": True, "wires": 1, "silent_s": 0.1, "busy": "",
             "under_way": 0, "credit_messages": 10, "credit_bytes": 100, "lane": True, "lane_messages": 5,
             "ring_arrays": 1}
    return LinkReport(actor=actor, **{**known, **facts})


def links(*reports: LinkReport) -> dict[str, LinkReport]:
    return {report.actor: report for report in reports}


def only(said: dict[str, Any], actors: set[str]) -> Edge:
    found = edges(said, actors)
    assert len(found) == 1
    return found[0]


def test_the_head_and_the_controller_are_linked_with_everybody() -> None:
    assert wanted_edges(["controller-0", "data-0", "rollout-7"]) == {
        ("registry-0", "controller-0"), ("registry-0", "data-0"), ("registry-0", "rollout-7"),
        ("controller-0", "data-0"), ("controller-0", "rollout-7")}


def test_an_edge_is_up_when_both_ends_say_so_and_has_the_worse_figures_of_the_two() -> None:
    said = {"registry-0": links(link("data-0", under_way=3, silent_s=2.0, wires=2)),
            "data-0": links(link("registry-0", credit_messages=4, busy="compiling"))}
    edge = only(said, {"data-0"})
    assert (edge.up, edge.bad, edge.why) == (True, False, "")
    assert (edge.wires, edge.silent_s, edge.under_way, edge.credit_messages, edge.busy) == (2, 2.0, (3, 0), 4,
                                                                                             "compiling")
    assert (edge.lane, edge.lane_messages, edge.ring_arrays) == (True, 10, 2)


@pytest.mark.parametrize(("said", "why"), [
    ({"registry-0": links(link("data-0")), "data-0": {}}, "data-0 has no link to registry-0"),
    ({"registry-0": {}, "data-0": links(link("registry-0"))}, "registry-0 has no link to data-0"),
    ({"registry-0": links(link("data-0")), "data-0": "nobody listens there"},
     "data-0 does not answer: nobody listens there"),
    ({"registry-0": links(link("data-0"))}, "data-0 is not in the run"),
    ({"registry-0": links(link("data-0", up=False, wires=3)), "data-0": links(link("registry-0"))},
     "registry-0 has no wire now, 3 used so far"),
    ({}, "registry-0 is not in the run; data-0 is not in the run"),
])
def test_else_it_is_not_and_the_line_says_at_which_end(said: dict[str, Any], why: str) -> None:
    edge = only(said, {"data-0"})
    assert (edge.up, edge.bad, edge.why) == (False, True, why)


def test_other_edges_are_shown_once_and_may_be_down() -> None:
    said = {"registry-0": links(link("data-0"), link("reward-0"), link("check-host-1")),
            "data-0": links(link("registry-0"), link("reward-0", up=False)),
            "reward-0": links(link("registry-0"), link("data-0", up=False))}
    found = edges(said, {"data-0", "reward-0"})
    assert [(edge.a, edge.b, edge.wanted, edge.bad) for edge in found] == [
        ("registry-0", "data-0", True, False), ("registry-0", "reward-0", True, False),
        ("data-0", "reward-0", False, False)]


# -- real actors -------------------------------------------------------------------------------------------------------


class Actors:
    """All actors of the packaged recipe on one loop, each with a bus and an address of its own."""

    def __init__(self, directory: RunDirectory, head: Any) -> None:
        self.directory, self.head = directory, head
        self.runtimes: dict[str, ActorRuntime] = {}
        self.fleet: Fleet

    async def open(self) -> None:
        names = ["controller-0", *(actor.actor for actor in plan(resolve("grpo-arithmetic")).actors)]
        for name in names:
            await self._add(name)
        for _ in range(500):
            if len(self.runtimes["controller-0"].bus.links) == len(names):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the controller is not linked with everybody")

    async def _add(self, name: str) -> None:
        role = name.rpartition("-")[0]
        keys = KeyRing.load(self.directory.keys / f"{role}.key")
        bus = Bus(Identity(keys.run_id, role, name, new_incarnation()), ZmqTransport(), keys)
        if role == "controller":
            self.fleet = Fleet(bus, stateful=frozenset(), max_in_flight=1, clock=SystemClock())
        runtime = ActorRuntime(bus, EchoRole, None, 7, worker=InlineWorker(), clock=SystemClock())
        self.runtimes[name] = runtime
        await runtime.start(self.head.address, "tcp://127.0.0.1:0")
        runtime.begin()

    async def close(self) -> None:
        self.fleet.close()
        for runtime in self.runtimes.values():
            await runtime.close()


@asynccontextmanager
async def running(root: Path) -> AsyncIterator[Actors]:
    """A run directory that is in use, its head, and its actors."""
    settings = resolve("grpo-arithmetic")
    with RunDirectory.create(root, "digest", run_id=heads.RUN, resolved=resolved_text(settings)) as directory:
        heads.make_keys(directory.keys)
        async with heads.head(directory.keys) as head:
            actors = Actors(directory, head)
            try:
                await actors.open()
                members = [plain(member) for member in head.registry.membership().members]
                (root / "status.json").write_text(json.dumps({"head": head.address, "members": members}))
                yield actors
            finally:
                await actors.close()


def test_every_edge_of_a_running_job_is_up(cli: Cli, here: Path) -> None:
    async def scenario() -> None:
        async with running(here / "run") as actors:
            answer = await heads.beside(cli, "check", "--live", "run", "--json")
            assert (answer.code, answer.err) == (0, "")
            found = json.loads(answer.out)["edges"]
            assert {(edge["a"], edge["b"]) for edge in found} == wanted_edges(actors.runtimes)
            assert all(edge["up"] and edge["wires"] == 1 and edge["lane"] for edge in found)
            lines = (await heads.beside(cli, "check", "--live", "run")).out.splitlines()
            assert len(lines) == len(found) and all(line.startswith("up ") for line in lines)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_an_edge_that_is_down_is_named_and_the_exit_code_says_so(cli: Cli, here: Path) -> None:
    async def scenario() -> None:
        async with running(here / "run") as actors:
            controller, data = actors.runtimes["controller-0"].bus, actors.runtimes["data-0"]
            actors.fleet.close()  # else it dials again at once
            controller.forget("data-0", data.bus.identity.incarnation, "forgotten by the test")
            answer = await heads.beside(cli, "check", "--live", "run")
            assert answer.code == 1
            assert answer.err.count("\n") == 1
            assert answer.err.startswith("error: controller-0 – data-0 is not up: controller-0 has no link to data-0")
            await data.close()
            answer = await heads.beside(cli, "check", "--live", "run")
            assert answer.code == 1
            assert "error: registry-0 – data-0 is not up: registry-0 has no link to data-0" in answer.err

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_run_that_is_not_up_has_no_edges(cli: Cli, here: Path) -> None:
    make_run(here / "run", metrics=[])
    assert "is not running, so nobody can be asked" in cli("check", "--live", "run").error
    assert "there is no run `nothing`" in cli("check", "--live", "nothing").error


def test_a_run_in_one_process_can_not_be_asked(cli: Cli, here: Path) -> None:
    with RunDirectory.create(here / "run", "digest", run_id=heads.RUN) as directory:
        (directory.root / "status.json").write_text(json.dumps({"head": "memory://head", "members": []}))
        assert "or runs in one process: nobody can dial its actors" in cli("check", "--live", "run").error


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stopped_process_of_a_real_job_is_named(cli: Cli, run: Run) -> None:
    process = run.start(sets=["run.steps=2000"])
    run.until_step(1)
    eventually(lambda: cli("check", "--live", str(run.directory)).code == 0, "every edge is up", within_s=60.0)
    pid = run.pid("reward-0")
    stop(pid)
    try:
        answer = cli("check", "--live", str(run.directory))
        assert answer.code == 1
        assert "registry-0 – reward-0 is not up: " in answer.err
        assert all("reward-0" in line for line in answer.err.splitlines())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert cli("stop", str(run.directory), "--now").code == 0
    process.wait(60.0)


@pytest.fixture
def run(tmp_path: Path, popen: Callable[..., Any]) -> Run:
    return Run(tmp_path, popen)
