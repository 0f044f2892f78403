"""What an actor has in hand, and when it is blocked: by a clock that the test turns."""

from __future__ import annotations

import pytest

from cosmos_actor.actors.in_hand import SHOWN, InHand


class Clock:
    def __init__(self) -> None:
        self.now, self.cpu_s = 100.0, 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def in_hand(clock: Clock) -> InHand:
    return InHand(clock)


def pass_time(clock: Clock, in_hand: InHand, seconds: float, *, cpu_share: float) -> None:
    """Looks four times a second, as the runtime does."""
    for _ in range(int(seconds * 4)):
        clock.now += 0.25
        clock.cpu_s += 0.25 * cpu_share
        in_hand.look(clock.cpu_s)


def test_a_computation_without_progress_and_without_cpu_is_blocked(clock, in_hand):
    with in_hand.compute("score"):
        pass_time(clock, in_hand, 3.0, cpu_share=0.0)
        assert in_hand.blocked_s() == pytest.approx(3.0, abs=0.26)


def test_one_that_uses_a_cpu_is_not_blocked_but_makes_no_progress_either(clock, in_hand):
    with in_hand.compute("update"):
        pass_time(clock, in_hand, 3.0, cpu_share=1.0)
        assert in_hand.blocked_s() == 0.0
        assert in_hand.still_s() == 3.0


def test_a_machine_that_gives_a_computation_a_twentieth_of_a_cpu_does_not_make_it_blocked(clock, in_hand):
    with in_hand.compute("update"):
        pass_time(clock, in_hand, 5.0, cpu_share=0.05)
        assert in_hand.blocked_s() == 0.0


def test_a_tick_is_progress(clock, in_hand):
    with in_hand.compute("score"):
        pass_time(clock, in_hand, 3.0, cpu_share=0.0)
        before = in_hand.progress
        in_hand.tick()
        assert in_hand.progress == before + 1
        assert in_hand.still_s() == in_hand.blocked_s() == 0.0


def test_nothing_is_still_or_blocked_in_a_declared_pause_and_time_counts_again_after_it_ran_out(clock, in_hand):
    with in_hand.compute("compile"), in_hand.pause("a compile", 60.0):
        pass_time(clock, in_hand, 59.0, cpu_share=0.0)
        assert in_hand.paused() == ("a compile", pytest.approx(1.0))
        assert in_hand.still_s() == in_hand.blocked_s() == 0.0
        pass_time(clock, in_hand, 3.0, cpu_share=0.0)
        assert in_hand.paused() == ("", 0.0)
        assert in_hand.still_s() == in_hand.blocked_s() == pytest.approx(2.0)


def test_of_two_pauses_the_one_that_ends_last_counts(clock, in_hand):
    with in_hand.pause("short", 1.0), in_hand.pause("long", 9.0):
        assert in_hand.paused() == ("long", 9.0)
    assert in_hand.paused() == ("", 0.0)


def test_an_actor_with_nothing_in_hand_is_idle_and_never_blocked(clock, in_hand):
    pass_time(clock, in_hand, 5.0, cpu_share=0.0)
    assert in_hand.blocked_s() == 0.0
    assert in_hand.facts() == {"idle_s": 5.0}


def test_the_facts_name_messages_waits_and_compute_oldest_first(clock, in_hand):
    with in_hand.message("first", "controller-0"):
        clock.now += 1.0
        with in_hand.message("second", "controller-0"), in_hand.waiting("weights 3", "policy"):
            clock.now += 2.0
            with in_hand.compute("generate"):
                facts = in_hand.facts()
    assert [(entry["what"], entry["of"], entry["for_s"]) for entry in facts["messages"]] == [
        ("first", "controller-0", 3.0), ("second", "controller-0", 2.0)]
    assert facts["waits"] == [{"what": "weights 3", "on": "policy", "for_s": 2.0}]
    assert facts["computing"]["what"] == "generate"
    assert in_hand.progress == 3


def test_however_much_is_in_hand_the_facts_are_short(in_hand):
    contexts = [in_hand.message(str(number), "controller-0") for number in range(1000)]
    for context in contexts:
        context.__enter__()
    assert len(in_hand.facts()["messages"]) == SHOWN


def test_a_handler_that_raises_leaves_nothing_in_hand(in_hand):
    with pytest.raises(ValueError), in_hand.message("question", "controller-0"), in_hand.compute("answer"):
        raise ValueError
    assert in_hand.label == "" and in_hand.facts() == {"idle_s": 0.0}
