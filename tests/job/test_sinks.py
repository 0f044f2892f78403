"""A sink has each episode once and in order, and nothing that it does is felt by the job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.job.sinks import Sinks, make_sinks
from tests.waiting import eventually

AT_ONCE_S = 1.0
"""Nothing that must not wait takes longer, also on a busy machine."""


def episode(number: int, step: int = 1, **more: Any) -> dict[str, Any]:
    return {"step": step, "unit": f"u{number}", "return": 1.0, **more}


class Told(list[dict[str, Any]]):
    """The events."""

    def __call__(self, event: str, **facts: Any) -> None:
        self.append({"event": event, **facts})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self if one["event"] == event]


class Keeps:
    """A sink that keeps what it is given; it takes nothing while its gate is shut, and raises at `raises`."""

    def __init__(self, raises: tuple[str, ...] = ()) -> None:
        self.records: list[dict[str, Any]] = []
        self.raises, self.closed = raises, 0
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, record: dict[str, Any]) -> None:
        self.gate.wait(20.0)
        if record["unit"] in self.raises:
            raise ConnectionError("the tracker\nis down")
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1

    @property
    def units(self) -> list[str]:
        return [record["unit"] for record in self.records]


@pytest.fixture
def told() -> Told:
    return Told()


def sinks_of(told: Any, *sinks: Any, **limits: Any) -> Sinks:
    return Sinks([str(at) for at in range(len(sinks))], lambda name: sinks[int(name)], told, **limits)


def test_each_sink_has_every_record_in_order_as_its_own_copy_and_is_closed_once(told: Told) -> None:
    keeps, plain = Keeps(), []
    sinks = sinks_of(told, keeps, plain.append)
    given = [episode(number) for number in range(200)]
    for record in given:
        sinks.offer(record)
    sinks.close()
    assert keeps.records == plain == given and keeps.closed == 1
    assert keeps.records[0] is not given[0] and keeps.records[0] is not plain[0]
    assert told == [] and sinks.statistics() == {}


def test_one_that_raises_is_told_once_counted_and_given_the_next(told: Told) -> None:
    keeps, well = Keeps(raises=("u1", "u3")), Keeps()
    sinks = sinks_of(told, keeps, well)
    for number in range(5):
        sinks.offer(episode(number))
    sinks.close()
    assert (keeps.units, well.units) == (["u0", "u2", "u4"], [f"u{number}" for number in range(5)])
    [first] = told.of("sink_trouble")
    assert (first["sink"], first["reason"]) == ("0", "failed")
    assert first["text"] == "it raised ConnectionError: the tracker is down at an episode; it is given the next ones"
    assert told.of("sink_lost") == [{
        "event": "sink_lost", "sink": "0", "text": "of 5 episodes it did not get: 2 failed", "failed": 2}]
    assert keeps.closed == 1 and sinks.statistics() == {"0/failed": 2}


def stops(name: str) -> Callable[[Any], Any]:
    raise SystemExit("no licence")


def test_one_that_can_not_be_made_is_told_at_once_and_counted(told: Told) -> None:
    sinks = Sinks(["mine"], stops, told)
    eventually(lambda: told, "the event")
    assert told[0]["text"] == "it can not be made: SystemExit: no licence"
    sinks.offer(episode(1))
    sinks.close()
    assert [event["event"] for event in told] == ["sink_trouble", "sink_lost"] and told[1]["failed"] == 1


def test_one_that_hangs_holds_nobody_up_and_what_it_misses_is_counted(told: Told) -> None:
    hangs, well = Keeps(), Keeps()
    hangs.gate.clear()
    sinks = sinks_of(told, hangs, well, most=3, settle_s=0.05, close_s=0.05)
    begun = time.monotonic()
    for number in range(10):
        sinks.offer(episode(number))
        eventually(lambda: len(well.records) > number, "the other sink having it")  # noqa: B023
    for _ in range(100):
        sinks.settle()  # it is waited for once
    sinks.close()
    assert time.monotonic() - begun < AT_ONCE_S + 10 * 0.05
    lost = told.of("sink_lost")[0]
    assert lost["dropped"] in (6, 7) and lost["dropped"] + lost["left"] == 10  # one may be in its hand
    assert [event["reason"] for event in told.of("sink_trouble")] == ["dropped", "late", "left"]
    assert well.units == [f"u{number}" for number in range(10)] and well.closed == 1
    hangs.gate.set()


def test_one_that_hangs_when_it_is_closed_has_missed_nothing(told: Told) -> None:
    keeps, closing = Keeps(), threading.Event()
    keeps.close = lambda: closing.wait(20.0)  # type: ignore[method-assign,return-value,assignment]
    sinks = sinks_of(told, keeps, close_s=0.2)
    sinks.offer(episode(1))
    sinks.close()
    closing.set()
    assert [(event["event"], event["reason"]) for event in told] == [("sink_trouble", "left")]
    assert keeps.units == ["u1"] and sinks.statistics() == {}


class Panic(BaseException):
    """What a library in Rust raises."""


def test_whatever_one_raises_what_it_misses_is_counted(told: Told) -> None:
    def panics(record: dict[str, Any]) -> None:
        raise Panic("index out of range")

    sinks = sinks_of(told, panics)
    for number in range(3):
        sinks.offer(episode(number))
    sinks.close()
    assert sinks.statistics() == {"0/failed": 3} and "Panic: index out of range" in told[0]["text"]


def test_before_a_checkpoint_it_has_taken_everything(told: Told) -> None:
    keeps = Keeps()
    keeps.gate.clear()
    sinks = sinks_of(told, keeps, settle_s=20.0)
    for number in range(50):
        sinks.offer(episode(number))
    threading.Timer(0.05, keeps.gate.set).start()
    sinks.settle()
    assert len(keeps.records) == 50 and told == []
    sinks.close()


def test_a_line_that_is_written_again_is_not_sent_again(told: Told) -> None:
    keeps = Keeps()
    sinks = sinks_of(told, keeps)
    lines = [episode(1, 1), episode(2, 2), episode(3, 2, phase="eval"), episode(3, 4, phase="eval")]
    for line in lines:
        sinks.offer(line)
    sinks.cut_off([line for line in lines if line["step"] > 1])
    for line in (episode(2, 2), episode(4, 2), episode(3, 2, phase="eval"), episode(3, 4, phase="eval"),
                 episode(3, 6, phase="eval")):
        sinks.offer(line)
    sinks.close()
    assert [(record["unit"], record["step"]) for record in keeps.records] == [
        ("u1", 1), ("u2", 2), ("u3", 2), ("u3", 4), ("u4", 2), ("u3", 6)]


def test_a_disk_on_which_nothing_can_be_told_ends_no_thread() -> None:
    keeps = Keeps(raises=("u0",))

    def full(event: str, **facts: Any) -> None:
        raise OSError(28, "No space left on device")

    sinks = sinks_of(full, keeps)
    for number in range(3):
        sinks.offer(episode(number))
    sinks.close()
    assert keeps.units == ["u1", "u2"] and keeps.closed == 1


def test_a_sink_is_made_with_the_settings_and_the_run_directory(tmp_path: Path, told: Told) -> None:
    settings = SimpleNamespace(sim=SimpleNamespace(sinks=("tests.job.plug_ins:Lines", "tests.job.plug_ins:no_sink")),
                               run=SimpleNamespace(name="run"))
    sinks = make_sinks(settings, tmp_path, told)
    sinks.offer(episode(1))
    sinks.close()
    written = (tmp_path / "sink.jsonl").read_text().splitlines()
    assert '"unit": "u1"' in written[0] and '"closed": true' in written[1]
    [trouble] = told.of("sink_trouble")
    assert trouble["text"] == ("it can not be made: TypeError: it is int, which can not be called with a record")
