"""A reference takes the frozen weights whole, again where they come damaged, and says so when it can not have them."""

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
from cosmos_actor.roles.fetching import MOST_PULLS
from cosmos_actor.roles.messages import REFERENCE_TOPIC, WeightsAlarm, WeightsReport
from cosmos_actor.roles.reference import ReferenceRole
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.version import Version
from tests.weight_plane.memory_bulk import MemoryBulk
from tests.weight_plane.test_digest import a_model


class Scorer:
    """Holds what it was given."""

    digest = ""

    def load_weights(self, tensors: Any, version: int, digest: str) -> str:
        self.digest = digest
        return digest


class NoRoom(Scorer):
    def load_weights(self, tensors: Any, version: int, digest: str) -> str:
        raise MemoryError("no 8 bytes to be had")


class Reference:
    """A reference role, what is frozen, and all that it says; the first `damaged` fetches come with a wrong bit."""

    def __init__(self, damaged: int, scorer: Any = None) -> None:
        self.said: list[Any] = []
        self.damaged = damaged
        bulk = MemoryBulk()
        bulk.on_fetch = self._on_fetch
        self.manifest = WeightPublisher(bulk, keep=1).publish(Version("run", 0, 4), a_model(4))
        settings = SimpleNamespace(weights=SimpleNamespace(deadline_s=30.0))
        self.role = ReferenceRole(Context(
            Identity("run", "reference", "reference-0", "1"), settings, seed=0, clock=SystemClock(),
            worker=InlineWorker(), weights=WeightSubscriber(bulk, "run"), emit=self._emit))
        self.role.scorer = scorer or Scorer()
        self.role.begin()
        asyncio.run(self.role.on_weights(self.manifest))

    async def _emit(self, word: Any) -> None:
        self.said.append(word)

    def _on_fetch(self, generation: int, array: np.ndarray) -> np.ndarray:
        self.damaged -= 1
        return array ^ np.uint8(self.damaged >= 0)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(fetching, "PULL_AGAIN_S", 0.001)


def test_damaged_bytes_are_an_alarm_and_fetched_again():
    reference = Reference(damaged=1)
    [alarm] = reference.said
    assert isinstance(alarm, WeightsAlarm)
    assert (alarm.actor, alarm.step, alarm.topic, alarm.left) == ("reference-0", 4, REFERENCE_TOPIC, MOST_PULLS - 1)
    assert reference.role.scorer.digest == reference.manifest.digest and reference.role.taken.is_set()


def test_whatever_keeps_it_from_taking_them_is_said():
    reference = Reference(damaged=0, scorer=NoRoom())
    assert [word.problem for word in reference.said] == ["MemoryError: no 8 bytes to be had"]


def test_what_it_can_not_have_it_says_at_once():
    reference = Reference(damaged=1000)
    *alarms, report = reference.said
    assert len(alarms) == MOST_PULLS and not reference.role.taken.is_set()
    assert isinstance(report, WeightsReport) and report.problem.startswith("WeightsCorrupt: tensor ")
    assert (report.actor, report.epoch, report.step, report.topic) == ("reference-0", 0, 4, REFERENCE_TOPIC)
