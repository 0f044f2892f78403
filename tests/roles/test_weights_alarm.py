"""A version that comes damaged is an alarm: the one before goes on acting, and it is fetched again, not for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.worker import InlineWorker
from cosmos_actor.bus import Identity
from cosmos_actor.roles import fetching
from cosmos_actor.roles.engine import HeldWeights
from cosmos_actor.roles.fetching import MOST_PULLS
from cosmos_actor.roles.messages import AskWeights, WeightsAlarm, WeightsReport
from cosmos_actor.roles.newer_weights import check_offer
from cosmos_actor.roles.weights_holder import WeightsHolder
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.version import Version
from tests.actors.groups import make_group
from tests.weight_plane.memory_bulk import MemoryBulk
from tests.weight_plane.test_digest import a_model


class Engine:
    """Holds what it was given, once it is what its digest says."""

    def __init__(self) -> None:
        self.tensors: dict[str, np.ndarray] = {}

    def load_weights(self, tensors: Any, version: int, digest: str) -> str:
        check_offer(HeldWeights(-1, ""), tensors, version, digest)
        self.tensors = {name: tensor.copy() for name, tensor in tensors.items()}
        return self.read_back()

    def read_back(self) -> str:
        return weights_digest(self.tensors)


class Holder:
    """A rollout's part that holds weights, who publishes to it, and all that it says."""

    def __init__(self, delta: Any = "never") -> None:
        self.said: list[Any] = []
        self.bulk = MemoryBulk()
        self.publisher = WeightPublisher(self.bulk, deltas=delta != "never")
        self.damaged = 0
        """How many of the next fetches come damaged."""
        self.bulk.on_fetch = self._on_fetch
        settings = SimpleNamespace(weights=SimpleNamespace(deadline_s=30.0))
        context = Context(Identity("run", "rollout", "rollout-0", "1"), settings, seed=0, clock=SystemClock(),
                          worker=InlineWorker(), weights=WeightSubscriber(self.bulk, "run", delta=delta),
                          emit=self._emit)
        self.role = WeightsHolder(context)
        self.role.hold_nothing()
        self.role.engine = Engine()

    def take(self, step: int, *, epoch: int = 0, damaged: int = 0, model: Any = None) -> list[Any]:
        """What it says when version `step` is announced and the first `damaged` fetches are."""
        self.damaged, self.said = damaged, []
        manifest = self.publisher.publish(Version("run", epoch, step), model or a_model(step))
        asyncio.run(self.role.on_weights(manifest))
        return self.said

    async def _emit(self, word: Any) -> None:
        self.said.append((word, str(self.role.held and self.role.held.version), self.role.engine.read_back()))

    def _on_fetch(self, generation: int, array: np.ndarray) -> np.ndarray:
        self.damaged -= 1
        if self.damaged < 0:
            return array
        flipped = array.copy()
        flipped[0] ^= 1
        return flipped


@pytest.fixture
def holder(monkeypatch):
    monkeypatch.setattr(fetching, "PULL_AGAIN_S", 0.001)
    return Holder()


def test_one_flipped_byte_keeps_the_old_version_and_the_new_one_is_fetched_again(holder):
    holder.take(1)
    old = holder.role.engine.read_back()
    (alarm, held, digest), (report, _, _) = holder.take(2, damaged=1)
    assert isinstance(alarm, WeightsAlarm) and (held, digest) == ("0.1", old)
    assert (alarm.actor, alarm.step, alarm.left) == ("rollout-0", 2, MOST_PULLS - 1)
    assert alarm.tensor in a_model() and alarm.tensor in alarm.problem
    assert isinstance(report, WeightsReport) and report.problem == ""
    assert report.digest == weights_digest(a_model(2)) == holder.role.engine.read_back()


def test_damage_that_stays_is_reported_after_a_bounded_number_of_alarms_and_the_old_version_acts_on(holder):
    holder.take(1)
    said = holder.take(2, damaged=100)
    assert [word.left for word, _, _ in said[:-1]] == list(reversed(range(MOST_PULLS)))
    report = said[-1][0]
    assert report.digest == "" and report.problem.startswith("WeightsCorrupt: tensor ")
    assert holder.role.weights_held() == "0.1"
    assert holder.take(3)[-1][0].problem == ""


def test_whatever_keeps_it_from_taking_a_version_is_reported_and_the_next_one_is_taken(holder, monkeypatch):
    holder.take(1)

    def no_room(*arguments: Any) -> str:
        raise MemoryError("no 8 bytes to be had")

    with monkeypatch.context() as patched:
        patched.setattr(holder.role.engine, "load_weights", no_room)
        [(report, held, _)] = holder.take(2)
    assert (report.step, report.digest, report.problem) == (2, "", "MemoryError: no 8 bytes to be had")
    assert held == "0.1"
    assert holder.take(3)[-1][0].digest == holder.role.engine.read_back() == weights_digest(a_model(3))


@pytest.mark.parametrize("goes_on", [True, False], ids=["the swap is done after all", "the swap never began"])
def test_a_link_that_ends_between_pull_and_swap_costs_nothing_when_the_version_is_announced_again(holder, goes_on):
    role = holder.role
    manifest = holder.publisher.publish(Version("run", 0, 1), a_model(1))
    swap_under_way, let_go = asyncio.Event(), asyncio.Event()
    compute, swapping = role.context.compute, []

    async def slow(label: str, function: Any, *arguments: Any) -> Any:
        async def work() -> Any:
            swap_under_way.set()
            await let_go.wait()
            return await compute(label, function, *arguments) if goes_on or len(swapping) > 1 else None

        swapping.append(asyncio.ensure_future(work()))
        return await asyncio.shield(swapping[-1])  # as in a worker: nobody stops what began there

    async def run() -> None:
        role.context.compute = slow
        first = asyncio.ensure_future(role.on_weights(manifest))
        await swap_under_way.wait()
        first.cancel()  # the link over which it was announced is over
        again = asyncio.ensure_future(role.on_weights(manifest))
        let_go.set()
        await asyncio.gather(first, again, return_exceptions=True)

    asyncio.run(run())
    [(report, held, digest)] = holder.said
    assert (report.problem, held) == ("", "0.1") and report.digest == digest == weights_digest(a_model(1))


def test_a_byte_that_fell_over_in_its_own_base_of_deltas_is_an_alarm_and_the_version_comes_whole(monkeypatch):
    monkeypatch.setattr(fetching, "PULL_AGAIN_S", 0.001)
    holder = Holder(delta="always")
    model = {"a": np.arange(40_000, dtype=np.uint16), "b": np.arange(60_000, dtype=np.uint16)}
    for step in (1, 2, 3, 4):
        model = {"a": model["a"] + (np.arange(40_000) == step).astype(np.uint16), "b": model["b"]}
        if step == 3:
            holder.role.context.weights._deltas._base.tensors["b"][7] ^= 1
        *alarms, (report, _, _) = holder.take(step, model=model)
        assert (report.problem, report.digest) == ("", weights_digest(model)) and report.digest == (
            holder.role.engine.read_back())
        assert [(word.tensor, word.left, held) for word, held, _ in alarms] == (
            [("(all)", MOST_PULLS - 1, "0.2")] if step == 3 else [])
    found = holder.role.context.weights.statistics()
    assert (found["deltas"], found["pulled"], found["newest"]) == (3, 5, "0.4")


def test_it_proves_what_the_engine_holds_now_and_not_what_it_remembers(holder):
    assert asyncio.run(holder.role.prove(AskWeights())).version == ""
    holder.take(1)
    proof = asyncio.run(holder.role.prove(AskWeights()))
    assert proof.version == "0.1" and proof.digest == proof.expected == weights_digest(a_model(1))
    holder.role.engine.tensors["norm"] = holder.role.engine.tensors["norm"] + 1
    proof = asyncio.run(holder.role.prove(AskWeights()))
    assert proof.digest != proof.expected == weights_digest(a_model(1))


def test_it_vouches_for_every_version_that_made_a_group(holder):
    for step in (1, 2, 3, 4):
        holder.take(step)
    made = [make_group(version=2), make_group(version=3)]
    assert holder.role.proof_of(made) == {f"0.{step}": weights_digest(a_model(step)) for step in (2, 3)}
    facts = holder.role.weights_proof()
    assert facts["version"] == "0.4" and facts["digest"] == weights_digest(a_model(4)) and facts["since"] > 0


def test_what_it_held_in_an_earlier_life_of_the_job_vouches_for_nothing(holder):
    holder.take(2)
    holder.take(1, epoch=1)
    holder.take(2, epoch=1)
    assert holder.role.proof_of([make_group(version=2)]) == {"1.2": weights_digest(a_model(2))}
