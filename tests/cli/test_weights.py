"""`weights verify` compares what every engine reads back now with what the policy published; `status` says what each
last said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.messages import plain
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.actors.worker import InlineWorker
from cosmos_actor.bus import Bus, Identity, KeyRing, ZmqTransport, new_incarnation
from cosmos_actor.cli.run_state import published_weights, weights_of
from cosmos_actor.cli.status import held_line
from cosmos_actor.cli.weights import compare
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.recipes.resolved import resolved_text
from cosmos_actor.roles.messages import AskWeights, WeightsProof
from tests.cli import heads
from tests.cli.conftest import Cli
from tests.cli.sample_run import make_run

A, B = "a" * 64, "b" * 64


def proof(version: str = "0.3", digest: str = A, expected: str = A) -> WeightsProof:
    return WeightsProof(version, digest, expected, 0.25)


# -- the rule, without sockets -----------------------------------------------------------------------------------------


def verdicts(policy: Any, **rollouts: Any) -> dict[str, str]:
    """Actor -> why it is not equal."""
    said = {name.replace("_", "-"): ("rollout", answer) for name, answer in rollouts.items()}
    return {verdict.actor: verdict.why for verdict in compare({**said, "policy-0": ("policy", policy)})}


def test_all_are_equal_when_each_reads_back_what_was_published():
    assert verdicts(proof(), rollout_0=proof(), rollout_1=proof()) == {"policy-0": "", "rollout-0": "", "rollout-1": ""}


@pytest.mark.parametrize(("policy", "rollout", "whose", "why"), [
    (proof(), proof(digest=B), "rollout-0", "took 0.3 as aaaaaaaaaaaa, and its engine now holds bbbbbbbbbbbb"),
    (proof(), proof(digest=B, expected=B), "rollout-0", "holds 0.3 as bbbbbbbbbbbb, published was aaaaaaaaaaaa"),
    (proof(), proof("0.2"), "rollout-0", "holds 0.2, published is 0.3"),
    (proof(), proof("", "", ""), "rollout-0", "holds no weights yet"),
    (proof(), "did not answer within 3 s", "rollout-0", "did not answer within 3 s"),
    (proof(digest=B), proof(), "policy-0", "published 0.3 as aaaaaaaaaaaa, and what others pull now is bbbbbbbbbbbb"),
    (proof(digest=""), proof(), "policy-0", "published 0.3 as aaaaaaaaaaaa, and what others pull now is nothing"),
    (proof("", "", ""), proof(), "policy-0", "has published nothing yet"),
])
def test_who_is_not_equal_is_named_with_both_digests(policy, rollout, whose, why):
    found = verdicts(policy, rollout_0=rollout, rollout_1=proof())
    assert found[whose] == why


def test_without_the_policy_nothing_is_proved():
    assert verdicts("can not be reached at tcp://h:1", rollout_0=proof()) == {
        "policy-0": "can not be reached at tcp://h:1", "rollout-0": "there is nothing published to compare it with"}


def test_status_says_which_digest_each_engine_holds_and_whether_it_is_the_published_one():
    def member(role: str, version: str, digest: str) -> dict[str, Any]:
        recent = {"recent": {"0.2": B, "0.3": A}} if role == "policy" else {}
        weights = {"version": version, "digest": digest, "since": 1000.0, **recent}
        return {"role": role, "statistics": {"weights": weights}}

    published = published_weights([{"role": "data"}, member("policy", "0.3", A)])
    assert published["digest"] == A
    for held, same, word in ((("0.3", A), True, "as published"), (("0.2", B), True, "as published"),
                             (("0.3", B), False, "NOT as published"), (("0.4", A), None, "held")):
        weights = weights_of(member("rollout", *held), published)
        assert weights["as_published"] is same
        line = held_line({"role": "rollout", "weights": weights, "weights_held": held[0]})
        assert line.startswith(f"{held[0]} {held[1][:12]} {word} since ")
    assert weights_of({}, published) is None
    assert held_line({"role": "reference", "weights": None, "weights_held": "4"}) == "4"


# -- real actors -------------------------------------------------------------------------------------------------------


class Proving(Role):
    """Says the proof that the test set; None: it never answers."""

    proofs: dict[str, list[WeightsProof | None]] = {}

    @handles(AskWeights, concurrency=8)
    async def prove(self, question: AskWeights) -> WeightsProof:
        left = self.proofs[self.context.identity.actor]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is None:
            await asyncio.Event().wait()
        assert answer is not None
        return answer


@asynccontextmanager
async def running(root: Path, **proofs: WeightsProof | None | list[WeightsProof | None]) -> AsyncIterator[None]:
    """A run directory that is in use, its head, and an actor for each of `proofs`."""
    Proving.proofs = {name.replace("_", "-"): said if isinstance(said, list) else [said]
                      for name, said in proofs.items()}
    runtimes = []
    with RunDirectory.create(root, "digest", run_id=heads.RUN) as directory:
        heads.make_keys(directory.keys)
        async with heads.head(directory.keys) as head:
            try:
                for name in Proving.proofs:
                    keys = KeyRing.load(directory.keys / f"{name.rpartition('-')[0]}.key")
                    bus = Bus(Identity(keys.run_id, keys.role, name, new_incarnation()), ZmqTransport(), keys)
                    runtime = ActorRuntime(bus, _role, None, 7, worker=InlineWorker(), clock=SystemClock())
                    runtimes.append(runtime)
                    await runtime.start(head.address, "tcp://127.0.0.1:0")
                    runtime.begin()
                members = [plain(member) for member in head.registry.membership().members]
                (root / "status.json").write_text(json.dumps({"head": head.address, "members": members}))
                yield
            finally:
                for runtime in runtimes:
                    await runtime.close()


def _role(context: Context) -> Role:
    return Proving(context)


def ask(cli: Cli, here: Path, *options: str, **proofs: Any) -> Any:
    async def scenario() -> Any:
        async with running(here / "run", **proofs):
            return await heads.beside(cli, "weights", "verify", "run", *options)

    return asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_every_engine_is_asked_and_the_exit_code_says_that_all_are_equal(cli: Cli, here: Path) -> None:
    answer = ask(cli, here, "--json", policy_0=proof(), rollout_0=proof(), rollout_1=proof(), data_0=None)
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert found["ok"] and [row["actor"] for row in found["actors"]] == ["policy-0", "rollout-0", "rollout-1"]
    assert all(row["digest"] == A and row["equal"] for row in found["actors"])


def test_one_that_holds_something_else_is_named_in_one_line(cli: Cli, here: Path) -> None:
    answer = ask(cli, here, policy_0=proof(), rollout_0=proof(), rollout_1=proof(digest=B))
    assert answer.code == 1 and answer.err == (
        "error: rollout-1: took 0.3 as aaaaaaaaaaaa, and its engine now holds bbbbbbbbbbbb\n")
    assert "NOT EQUAL" in answer.out and answer.out.count("equal") == 1


def test_one_that_does_not_answer_is_named_when_the_deadline_is_over(cli: Cli, here: Path) -> None:
    answer = ask(cli, here, "--deadline", "0.5", policy_0=proof(), rollout_0=None)
    assert answer.code == 1 and answer.err.startswith("error: rollout-0: did not answer within 0.5 s")


def test_one_that_was_just_taking_a_newer_version_is_asked_again(cli: Cli, here: Path) -> None:
    answer = ask(cli, here, policy_0=proof(), rollout_0=[proof("0.2", B, B), proof()])
    assert (answer.code, answer.err) == (0, "")


def test_those_that_hold_nothing_yet_are_asked_again_as_the_first_version_is_on_its_way(cli: Cli, here: Path) -> None:
    nothing = proof("", "", "")
    answer = ask(cli, here, policy_0=[nothing, proof()], rollout_0=[nothing, nothing, proof()])
    assert (answer.code, answer.err) == (0, "") and "published" in answer.out and "equal" in answer.out


def plan(root: Path, rollouts: int) -> None:
    """The run says which actors it keeps alive."""
    settings = resolve("grpo-arithmetic", [f"rollout.count={rollouts}"])
    (root / "config.resolved.toml").write_text(resolved_text(settings))


def test_in_a_runs_first_seconds_who_is_still_to_come_is_waited_for_and_named(cli: Cli, here: Path) -> None:
    async def scenario() -> Any:
        async with running(here / "run", policy_0=proof(), rollout_0=proof(), rollout_1=proof()):
            plan(here / "run", 2)
            status = here / "run" / "status.json"
            whole = json.loads(status.read_text())
            status.unlink()
            asked = asyncio.ensure_future(heads.beside(cli, "weights", "verify", "run"))
            for members in (whole["members"][:2], whole["members"]):
                await asyncio.sleep(1.5)
                assert not asked.done()
                scratch = here / "scratch"
                scratch.write_text(json.dumps({**whole, "members": members}))
                scratch.replace(status)
            return await asked

    answer = asyncio.run(asyncio.wait_for(scenario(), 60.0))
    assert answer.code == 0 and answer.out.count("equal") == 2
    assert answer.err.splitlines() == [
        "waiting for policy-0, rollout-0, rollout-1 to come", "waiting for rollout-1 to come"]


@pytest.mark.parametrize("status", [True, False])
def test_one_that_does_not_come_is_named_when_the_deadline_is_over(cli: Cli, here: Path, status: bool) -> None:
    async def scenario() -> Any:
        async with running(here / "run", policy_0=proof()):
            plan(here / "run", 1)
            if not status:
                (here / "run" / "status.json").unlink()
            return await heads.beside(cli, "weights", "verify", "run", "--deadline", "1")

    answer = asyncio.run(asyncio.wait_for(scenario(), 60.0))
    assert answer.code == 1 and "error: rollout-0: has not come within 1 s" in answer.err
    assert ("error: policy-0: has not come" in answer.err) is not status


def test_who_holds_nothing_or_does_not_answer_is_not_called_unequal(cli: Cli, here: Path) -> None:
    answer = ask(cli, here, "--deadline", "0.5", policy_0=proof("", "", ""), rollout_0=None)
    assert answer.code == 1 and "NOT EQUAL" not in answer.out
    assert [line.split()[-3:-1] for line in answer.out.splitlines() if "-0" in line] == [
        ["NOTHING", "YET"], ["NO", "ANSWER"]]
    assert "error: policy-0: has published nothing yet\n" in answer.err


def test_a_run_without_rollouts_or_one_that_is_not_up_proves_nothing(cli: Cli, here: Path) -> None:
    async def scenario() -> Any:
        async with running(here / "run", policy_0=proof()):
            plan(here / "run", 0)
            return await heads.beside(cli, "weights", "verify", "run")

    answer = asyncio.run(asyncio.wait_for(scenario(), 60.0))
    assert answer.code == 1 and answer.err == "error: no rollout takes part in this run\n"
    make_run(here / "ended", metrics=[])
    assert "is not running, so nobody can be asked (setting `RUN`)" in cli("weights", "verify", "ended").error
    with RunDirectory.create(here / "inproc", "digest", run_id="inproc") as directory:
        plan(directory.root, 1)
        directory.metrics.write_text('{"step": 1}\n')
        assert "or runs in one process" in cli("weights", "verify", "inproc").error
    assert "there is no `weights compare`; there is `weights verify`" in cli("weights", "compare").error
