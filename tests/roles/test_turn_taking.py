"""A rollout that has its device in turn has no engine before it, takes nothing asleep, and hears no late word."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles import rollout as module
from cosmos_actor.roles.engine import KV_CACHE, WEIGHTS, EngineError
from cosmos_actor.roles.messages import AskWeights, GenerationRequest
from cosmos_actor.roles.policy import PolicyRole
from cosmos_actor.roles.rollout import RolloutRole
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.roles.turn_messages import ParkRequest, SleepRequest, UnparkRequest, WakeRequest
from cosmos_actor.roles.turn_taking import LateWord, TurnOrder
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version
from tests.roles.test_engine import items, make_engine, settings, weights_of
from tests.roles.test_policy_snapshot import FLAGS, resolve
from tests.trainer.make import MODEL

WEIGHTS_3 = weights_of(3)
DIGEST = weights_digest(WEIGHTS_3)


class Source:
    """Weights that can be pulled, each version once unless it is doubted."""

    def __init__(self) -> None:
        self.pulled: list[str] = []
        self.gate: asyncio.Event | None = None

    async def pull(self, manifest: Manifest, deadline_s: float) -> dict[str, np.ndarray]:
        assert str(manifest.version) not in self.pulled, "this version was given already"
        self.pulled.append(str(manifest.version))
        if self.gate is not None:
            await self.gate.wait()
        return WEIGHTS_3

    def doubt(self, version: Version) -> None:
        if str(version) in self.pulled:
            self.pulled.remove(str(version))


class Taking:
    """A real rollout role with a real engine, and what it said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **rollout: Any) -> None:
        self.worker, self.source, self.reports, self.made = ThreadWorker("test"), Source(), [], 0
        section = {"engine": "torch", "on_new_weights": "wait", "probe_s": 60.0, **rollout}
        about = SimpleNamespace(
            run=SimpleNamespace(grouping="single", deadline_s=0.2), rollout=SimpleNamespace(**section),
            weights=SimpleNamespace(deadline_s=5.0), policy=SimpleNamespace(model=MODEL),
            supervisor=SimpleNamespace(start_s=60.0))
        self.role = RolloutRole(Context(
            Identity("run", "rollout", "rollout-0", "1"), about, seed=0, clock=SystemClock(), worker=self.worker,
            weights=self.source, emit=self._heard, takes_turns=True))
        taking = self

        class Engines(TorchEngine):
            @classmethod
            def from_settings(cls, settings: Any) -> TorchEngine:
                taking.made += 1
                return make_engine()

        monkeypatch.setattr(module, "load_object", lambda *arguments, **options: Engines)
        self.role.setup()

    async def _heard(self, report: Any) -> None:
        self.reports.append((report.step, report.digest, report.problem))

    async def announce(self, step: int = 3) -> None:
        await self.role.on_weights(Manifest(Version("run", 0, step), DIGEST, [], []))

    async def wake(self, turn: int, *what: str) -> None:
        for part in what or (WEIGHTS, KV_CACHE):
            await self.role.wake(WakeRequest(0, turn, [part]))

    async def sleep(self, turn: int, level: int = 2) -> None:
        await self.role.sleep(SleepRequest(0, turn, level))


@pytest.fixture
def run(monkeypatch):
    def run(test: Any, **rollout: Any) -> None:
        async def bounded() -> None:
            taking = Taking(monkeypatch, **rollout)
            try:
                await asyncio.wait_for(test(taking), 30.0)
            finally:
                taking.worker.close()

        asyncio.run(bounded())

    return run


def test_there_is_no_engine_before_its_first_turn_and_one_after_it(run):
    async def test(taking: Taking) -> None:
        await taking.sleep(1)
        assert taking.made == 0
        await taking.wake(2)
        await taking.sleep(3)
        await taking.wake(4)
        assert taking.made == 1

    run(test)


@pytest.mark.parametrize("level", [1, 2])
def test_what_is_announced_while_it_sleeps_is_taken_when_it_is_announced_again(run, level):
    async def test(taking: Taking) -> None:
        await taking.announce()
        assert taking.reports == [] and taking.source.pulled == []
        await taking.wake(1, WEIGHTS)
        await taking.announce()
        assert taking.reports == [(3, DIGEST, "")] and taking.role.weights_held() == "0.3"
        await taking.wake(1, KV_CACHE)
        await taking.sleep(2, level)
        assert taking.role.weights_held() == ("0.3" if level == 1 else "")
        await taking.wake(3, WEIGHTS)
        await taking.announce()  # the same version: its weights may have been dropped
        await taking.wake(3, KV_CACHE)
        assert taking.reports == [(3, DIGEST, "")] * 2
        assert taking.role.engine.read_back() == DIGEST
        assert (await taking.role.prove(AskWeights())).digest == DIGEST

    run(test)


def test_a_version_that_is_on_its_way_when_it_is_put_to_sleep_is_no_problem_and_comes_again(run):
    async def test(taking: Taking) -> None:
        await taking.wake(1)
        taking.source.gate = asyncio.Event()
        pulling = asyncio.ensure_future(taking.announce())
        while not taking.source.pulled:
            await asyncio.sleep(0.01)
        await taking.sleep(2)
        taking.source.gate.set()
        await pulling
        assert taking.reports == [] and taking.source.pulled == []
        await taking.wake(3, WEIGHTS)
        await taking.announce()
        assert taking.reports == [(3, DIGEST, "")]

    run(test)


def test_what_is_in_flight_ends_before_it_sleeps(run):
    async def test(taking: Taking) -> None:
        await taking.wake(1)
        answering = asyncio.ensure_future(taking.role.stepping.generate(items(), settings()))
        await asyncio.sleep(0)
        await taking.sleep(2)
        assert answering.done() and len(answering.result()[0]) == len(items())

    run(test)


def test_who_asks_one_that_sleeps_waits_for_its_turn_and_is_told_at_the_deadline(run):
    async def test(taking: Taking) -> None:
        with pytest.raises(DeadlineExceeded, match=r"rollout-0 waited 0\.2 s to be woken.*run\.deadline_s"):
            await taking.role.generate(GenerationRequest([], 3, 0, False, 1.0))

    run(test)


def test_a_word_of_a_turn_that_is_over_wakes_nobody(run):
    async def test(taking: Taking) -> None:
        await taking.wake(1)
        await taking.sleep(2)
        with pytest.raises(LateWord, match=r"turn 0\.1 is over, 0\.2 has begun"):
            await taking.wake(1)
        assert not taking.role.wakefulness.holds_weights

    run(test)


def test_words_are_accepted_in_the_order_of_lives_and_turns():
    order = TurnOrder()
    for epoch, turn in ((0, 1), (0, 1), (0, 4), (1, 0)):
        order.accept(SleepRequest(epoch, turn, 1))
    with pytest.raises(LateWord):
        order.accept(SleepRequest(0, 9, 1))


def test_an_engine_that_can_not_sleep_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(TorchEngine, "sleep")

    async def test() -> None:
        taking = Taking(monkeypatch)
        try:
            with pytest.raises(EngineError, match=r'rollout\.engine = "torch" can not sleep: run\.colocated_offload'):
                await taking.wake(1)
        finally:
            taking.worker.close()

    asyncio.run(test())


def test_the_policy_has_no_model_before_its_first_restore_and_publishes_while_it_is_parked():
    from cosmos_actor.bus.bulk.settings import BulkSettings
    from cosmos_actor.bus.bulk.store import BulkStore
    from cosmos_actor.roles.messages import Published, PublishRequest, RestoreRequest
    from cosmos_actor.trainer.parking import Parked

    async def test() -> None:
        identity, worker, words = Identity("run", "policy", "policy-0", "1"), ThreadWorker("policy"), asyncio.Queue()
        store = BulkStore(identity, BulkSettings())
        role = PolicyRole(Context(identity, resolve("grpo-arithmetic", FLAGS), seed=0, clock=SystemClock(),
                                  worker=worker, bulk_store=store, emit=words.put, takes_turns=True))
        role.setup()
        assert role.trainer is None
        role.restore(RestoreRequest(None, 0, 0))
        await role.publish(PublishRequest(0, 0))
        role.park(ParkRequest(0, 1))
        assert isinstance(await asyncio.wait_for(words.get(), 20.0), Published)
        with pytest.raises(Parked):
            await role.publish(PublishRequest(0, 0))
        role.restore(RestoreRequest(None, 1, 0))  # the job went back: the policy is in its turn again
        await role.publish(PublishRequest(1, 0))
        role.park(ParkRequest(1, 2))
        with pytest.raises(LateWord):
            role.unpark(UnparkRequest(1, 1))
        role.unpark(UnparkRequest(1, 3))
        role.close()
        worker.close()
        store.close()

    asyncio.run(test())
