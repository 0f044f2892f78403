"""Two hosts and a bad cable: what is lost on the way comes again, what is over is found in time, nothing is doubled."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.bus import make_run_keys
from tests.bad_link import Cable, bad_link, skip_reason
from tests.netns import Host
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(120),
              pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))]
ROOT = Path(__file__).parents[2]
LOST_AFTER_S = 5.0


class Lines:
    """Lines of a process as they come."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.strip())


class Scene:
    def __init__(self, left: Host, right: Host, cable: Cable, folder: Path, popen: Callable[..., Any]) -> None:
        self.left, self.right, self.cable, self._popen = left, right, cable, popen
        self.keys = make_run_keys(folder / "keys", "run", ("controller", "rollout"))

    def consumer(self, *, pause_s: float = 0.0) -> Lines:
        found = self._start(self.right, "tests.hosts.consumer", str(self.keys["rollout"]),
                            f"tcp://{self.right.address}:0", str(pause_s), str(LOST_AFTER_S))
        self.address = eventually(lambda: found.lines and found.lines[0], "the consumer's address", within_s=20)
        return found

    def sender(self, *, count: int, batch: int, pause_s: float = 0.0) -> Lines:
        facts = {"key": str(self.keys["controller"]), "address": self.address, "count": count, "batch": batch,
                 "pause_s": pause_s, "lost_after_s": LOST_AFTER_S}
        found = self._start(self.left, "tests.hosts.sender", json.dumps(facts))
        eventually(lambda: found.lines, "the link", within_s=30)
        return found

    def _start(self, host: Host, module: str, *arguments: str) -> Lines:
        command = host.command([sys.executable, "-m", module, *arguments])
        return Lines(self._popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))


def end_of(sender: Lines) -> dict[str, Any]:
    assert sender.process.wait(90) == 0
    eventually(lambda: "answered" in sender.lines[-1], "the sender's last line")
    return json.loads(sender.lines[-1])  # type: ignore[no-any-return]


def handled(consumer: Lines) -> list[int]:
    return [int(line) for line in consumer.lines[1:] if line.isdigit()]


def done(sender: Lines) -> int:
    return max((json.loads(line).get("done", 0) for line in list(sender.lines)), default=0)


def lost(sender: Lines) -> dict[str, Any]:
    found: list[dict[str, Any]] = [json.loads(line) for line in list(sender.lines) if '"lost"' in line]
    return found[0] if found else {}


@pytest.fixture
def scene(tmp_path: Path, popen: Callable[..., Any]) -> Iterator[Scene]:
    with bad_link() as (left, right, cable):
        yield Scene(left, right, cable, tmp_path, popen)


def test_latency_and_loss_cost_time_and_nothing_else(scene: Scene) -> None:
    scene.cable.delay_s, scene.cable.loss = 0.02, 0.02
    consumer = scene.consumer()
    end = end_of(scene.sender(count=2000, batch=200))
    assert end["answered"] == 2000 and end["gaps"] == 0
    assert handled(consumer) == list(range(2000))


def test_a_partition_shorter_than_the_bus_waits_is_waited_out(scene: Scene) -> None:
    consumer = scene.consumer()
    sender = scene.sender(count=1000, batch=10, pause_s=0.02)
    eventually(lambda: done(sender) >= 100, "the first hundred", within_s=30)
    scene.cable.cut |= {"left", "right"}
    time.sleep(2.5)
    before = done(sender)
    time.sleep(0.2)
    assert done(sender) == before, "nothing gets through"
    scene.cable.cut.clear()
    end = end_of(sender)
    assert end["answered"] == 1000 and end["longest_s"] > 2 and not lost(sender)
    assert handled(consumer) == list(range(1000))


@pytest.mark.parametrize("cut", [{"left", "right"}, {"left"}, {"right"}], ids=["both ways", "one way", "the other way"])
def test_a_long_partition_is_a_loss_in_time_and_ends_with_a_new_link(scene: Scene, cut: set[str]) -> None:
    consumer = scene.consumer()
    sender = scene.sender(count=400, batch=10, pause_s=0.02)
    eventually(lambda: done(sender) >= 50, "the first fifty", within_s=30)
    scene.cable.cut |= cut
    eventually(lambda: lost(sender), "the sender notices", within_s=LOST_AFTER_S + 10)
    assert "no frame for" in lost(sender)["lost"] and LOST_AFTER_S <= lost(sender)["after_s"] < LOST_AFTER_S + 2
    scene.cable.cut.clear()
    end = end_of(sender)
    numbers = handled(consumer)
    assert end["answered"] == 400 and set(numbers) == set(range(400))
    # The batch under way when the link ended was told to be lost, and sent again by whoever had sent it.
    assert len(numbers) - 400 <= 10


def test_a_host_that_vanishes_without_a_word_is_found_within_ten_seconds(scene: Scene) -> None:
    """Half-open: the far kernel never says that the connection is gone."""
    consumer = scene.consumer()
    sender = scene.sender(count=100_000, batch=10, pause_s=0.02)
    eventually(lambda: done(sender) >= 50, "the first fifty", within_s=30)
    scene.cable.cut |= {"right"}
    consumer.process.kill()
    begun = time.monotonic()
    eventually(lambda: lost(sender), "the sender notices", within_s=15)
    assert time.monotonic() - begun < 10


def test_an_idle_link_survives_a_nat_that_forgets_idle_flows(scene: Scene) -> None:
    scene.cable.forgets_after_s = 3.0
    consumer = scene.consumer()
    end = end_of(scene.sender(count=3, batch=1, pause_s=8.0))
    assert end == {"answered": 3, "wires": 1, "gaps": 0, "longest_s": end["longest_s"]} and end["longest_s"] < 2
    assert handled(consumer) == [0, 1, 2]


def test_a_flow_that_was_forgotten_is_replaced(scene: Scene) -> None:
    consumer = scene.consumer()
    sender = scene.sender(count=300, batch=10, pause_s=0.02)
    eventually(lambda: done(sender) >= 50, "the first fifty", within_s=30)
    scene.cable.forgets_after_s = -1.0  # every flow there is, from its next packet on
    eventually(lambda: scene.cable._forgotten, "the flow is forgotten", within_s=10)
    scene.cable.forgets_after_s = 3600.0
    end = end_of(sender)
    assert end["answered"] == 300 and set(handled(consumer)) == set(range(300))
