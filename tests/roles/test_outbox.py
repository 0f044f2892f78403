"""Versions leave the policy one after another while it trains on; a late one takes the place of one that waits."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_actor.roles.outbox import Outbox
from cosmos_actor.trainer.snapshots import Snapshots
from cosmos_actor.weight_plane.version import Version


class Sender:
    """An outbox over real buffers, whose versions hold their own number; it publishes when told, or fails."""

    def __init__(self) -> None:
        self.outbox = Outbox(self._publish)
        self.snapshots = Snapshots()
        self.published: list[tuple[int, float]] = []
        self.meanwhile: Any = lambda: None
        self.fails = False

    def offer(self, step: int, epoch: int = 0) -> None:
        self.outbox.make_room()
        self.outbox.offer(Version("run", epoch, step), self.snapshots.take({"w": torch.full((3,), float(step))}))

    def newest(self) -> tuple[int, float] | None:
        return self.outbox.with_newest(lambda version, arrays: (version.step, float(arrays["w"][0])))

    def _publish(self, version: Version, tensors: Mapping[str, np.ndarray]) -> Any:
        self.meanwhile()
        if self.fails:
            raise RuntimeError("no room")
        self.published.append((version.step, float(tensors["w"][0])))
        return SimpleNamespace(version=version)


@pytest.fixture
def sender():
    made = Sender()
    yield made
    made.outbox.close()


def test_each_version_leaves_once_with_what_it_was(sender):
    for step in range(4):
        sender.offer(step)
        assert sender.outbox.send().version.step == step
        assert sender.outbox.send() is None
    assert sender.published == [(step, float(step)) for step in range(4)] and sender.outbox.replaced == 0


def test_a_late_version_takes_the_place_of_the_one_that_waits(sender):
    sender.offer(1)
    sender.meanwhile = lambda: [sender.offer(step) for step in (2, 3, 4)]
    sender.outbox.send()
    sender.meanwhile = lambda: None
    sender.outbox.send()
    assert sender.published == [(1, 1.0), (4, 4.0)] and sender.outbox.replaced == 2


def test_the_newest_keeps_its_memory_until_that_is_needed(sender):
    assert sender.newest() is None
    sender.offer(1)
    sender.outbox.send()
    sender.offer(2)
    assert sender.newest() == (1, 1.0)
    sender.meanwhile = lambda: sender.offer(3)  # two are in use: the one being published and this one
    sender.outbox.send()
    assert sender.newest() == (2, 2.0)
    sender.meanwhile = lambda: None
    sender.outbox.send()
    assert sender.newest() == (3, 3.0) and sender.outbox.replaced == 0


def test_what_could_not_be_published_frees_its_memory_and_the_one_before_is_kept(sender):
    sender.offer(1)
    sender.outbox.send()
    sender.fails = True
    for step in (2, 3, 4):
        sender.offer(step)
        with pytest.raises(RuntimeError, match="no room"):
            sender.outbox.send()
    assert sender.newest() == (1, 1.0)
    sender.fails = False
    sender.offer(5)
    assert sender.outbox.send().version.step == 5


def test_nothing_of_an_earlier_life_leaves_or_is_kept(sender):
    sender.offer(1)
    sender.outbox.send()
    sender.offer(2)
    sender.outbox.clear()
    assert sender.outbox.send() is None and sender.newest() is None
    sender.offer(1, epoch=1)
    sender.meanwhile = sender.outbox.clear  # the job goes back while it is being published
    sender.outbox.send()
    assert sender.newest() is None
    sender.meanwhile = lambda: None
    for step in range(3):  # and both buffers are free again
        sender.offer(step, epoch=2)
        sender.outbox.send()


def test_a_version_that_is_looked_at_is_not_written_over(sender):
    sender.offer(1)
    sender.outbox.send()

    def use(version: Version, arrays: Mapping[str, np.ndarray]) -> float:
        sender.offer(2)
        sender.offer(3)
        return float(arrays["w"][0])

    assert sender.outbox.with_newest(use) == 1.0
    sender.outbox.send()
    assert sender.newest() == (3, 3.0)
