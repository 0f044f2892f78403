from __future__ import annotations

from cosmos_actor.simulator_bridge.pace import FIRST_S, MARGIN, SLOW_S, Pace


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_was_never_done_is_announced_and_taken_back() -> None:
    told: list[tuple[str, float]] = []
    with Pace(lambda label, seconds: told.append((label, seconds)))("reset", "kitchen", slots=2):
        assert told == [("reset kitchen", 2 * FIRST_S)]
    assert told[1:] == [("", 0.0)]


def test_what_was_quick_is_not_announced_again_but_what_is_new_to_a_slot_is() -> None:
    time = Time()
    pace = Pace(clock=time)
    with pace("reset", "kitchen"):
        time.now += SLOW_S / 2
    assert pace.expected_s("reset") is None
    assert pace.expected_s("reset", first=True) == FIRST_S


def test_what_was_slow_once_is_announced_from_then_on_for_as_many_slots_as_it_is_for() -> None:
    time = Time()
    pace = Pace(clock=time)
    for seconds in (10.0, 0.1):
        with pace("step", slots=2):
            time.now += seconds
    assert pace.expected_s("step", slots=4) == MARGIN * 20.0


def test_many_quick_ones_together_are_slow() -> None:
    time = Time()
    pace = Pace(clock=time)
    with pace("step"):
        time.now += 0.1
    assert pace.expected_s("step", slots=4) is None
    assert pace.expected_s("step", slots=6) is not None


def test_it_is_taken_back_when_the_call_raises() -> None:
    told: list[float] = []
    pace = Pace(lambda label, seconds: told.append(seconds))
    try:
        with pace("step"):
            raise ValueError
    except ValueError:
        pass
    assert told == [FIRST_S, 0.0]


def test_between_quick_calls_a_word_is_said_now_and_then() -> None:
    time, beats = Time(), []
    pace = Pace(clock=time)
    pace.beat = lambda: beats.append(time.now)
    for _ in range(100):
        with pace("step"):
            time.now += 0.01
    assert len(beats) in (4, 5)
