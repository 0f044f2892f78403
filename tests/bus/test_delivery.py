"""The delivery core against a lossy, repeating, reordering channel, by properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus.delivery import FINISHED, GAP, NEW, OVER, RUNNING, SETTLED, Inbox, Outbox, Ranges

STEPS = st.lists(
    st.sampled_from(["send", "deliver", "drop", "repeat", "finish", "answer", "lose answer", "new wire", "floor"]),
    max_size=200,
)


class Model:
    """A sender and a receiver with a channel between them that a test drives step by step."""

    def __init__(self) -> None:
        self.outbox, self.inbox = Outbox(), Inbox(1000)
        self.channel: list[int] = []
        self.answers: list[int] = []
        self.handled: list[int] = []
        self.running: list[int] = []
        self.done: list[int] = []

    def send(self) -> None:
        self.channel.append(self.outbox.add(self.outbox.next_number))

    def deliver(self) -> None:
        if self.channel:
            self.receive(self.channel.pop(0))

    def receive(self, number: int) -> None:
        verdict = self.inbox.accept(number)
        if verdict is NEW:
            self.handled.append(number)
            self.running.append(number)
        elif verdict in (FINISHED, SETTLED):
            self.answers.append(number)

    def drop(self) -> None:
        if self.channel:
            self.channel.pop(0)

    def repeat(self) -> None:
        if self.channel:
            self.channel.append(self.channel[0])

    def finish(self) -> None:
        if self.running:
            number = self.running.pop()
            assert self.inbox.finish(number, f"result {number}")
            self.answers.append(number)

    def answer(self) -> None:
        if self.answers:
            number = self.answers.pop(0)
            if self.outbox.done(number) is not None:
                self.done.append(number)

    def lose_answer(self) -> None:
        if self.answers:
            self.answers.pop(0)

    def new_wire(self) -> None:
        self.channel = list(self.outbox.again())
        self.answers = []

    def floor(self) -> None:
        self.inbox.release(self.outbox.floor)

    def settle(self) -> None:
        """The channel works from here on."""
        for _ in range(3):
            self.new_wire()
            for step in (self.deliver, self.finish, self.answer):
                for _ in range(300):
                    step()


@given(STEPS)
def test_everything_sent_is_handled_once_in_order_and_done_once(steps: list[str]) -> None:
    model = Model()
    for step in steps:
        getattr(model, step.replace(" ", "_"))()
        assert model.handled == list(range(1, len(model.handled) + 1))
        assert len(model.done) == len(set(model.done))
        assert set(model.done) <= set(model.handled)
    model.settle()
    sent = model.outbox.next_number - 1
    assert model.handled == list(range(1, sent + 1))
    assert sorted(model.done) == list(range(1, sent + 1))
    assert len(model.outbox) == 0 and model.outbox.floor == sent + 1
    model.floor()
    assert not list(model.inbox.results()) and model.inbox.running == 0


@given(st.lists(st.integers(1, 60), max_size=120))
def test_ranges_hold_exactly_what_was_added(numbers: list[int]) -> None:
    ranges = Ranges()
    for number in numbers:
        ranges.add(number)
    assert bool(ranges) == bool(numbers)
    out = [number for first, last in ranges.take() for number in range(first, last + 1)]
    assert out == numbers and not ranges


@given(st.integers(1, 40), st.data())
def test_done_ranges_equal_single_dones(count: int, data: st.DataObject) -> None:
    one, other = Outbox(), Outbox()
    for number in range(count):
        one.add(number), other.add(number)
    for _ in range(5):
        first = data.draw(st.integers(1, count))
        last = data.draw(st.integers(first, count))
        singles = [entry for entry in (other.done(number) for number in range(first, last + 1)) if entry is not None]
        assert one.done_range(first, last) == singles
        assert one.floor == other.floor and len(one) == len(other)
        assert one.oldest() == other.oldest()


def test_verdicts() -> None:
    inbox = Inbox(1000)
    assert [inbox.accept(number) for number in (1, 1, 3, 2)] == [NEW, RUNNING, GAP, NEW]
    assert inbox.finish(1, "r") and not inbox.finish(1, "again")
    assert inbox.accept(1) is FINISHED and inbox.result(1) == "r"
    inbox.release(2)
    assert inbox.accept(1) is SETTLED
    assert inbox.statistics() == {"received": 2, "running": 1, "results_kept": 0, "duplicates": 3, "gaps": 1}


def test_more_than_the_window_does_not_run() -> None:
    inbox = Inbox(2)
    assert [inbox.accept(number) for number in (1, 2, 3)] == [NEW, NEW, OVER]
    inbox.finish(1)
    assert inbox.accept(3) is NEW


def test_what_was_never_sent_can_not_be_done() -> None:
    outbox, inbox = Outbox(), Inbox(1000)
    outbox.add("a")
    for numbers in ((0, 1), (1, 2), (2, 1)):
        with pytest.raises(ValueError, match="never sent"):
            outbox.done_range(*numbers)
    with pytest.raises(ValueError, match="never sent"):
        outbox.done(2)
    with pytest.raises(ValueError, match="above the next number"):
        inbox.release(2)


def test_a_result_that_the_sender_already_has_is_not_kept() -> None:
    inbox = Inbox(1000)
    inbox.accept(1), inbox.accept(2)
    inbox.finish(2, "kept")
    inbox.release(2)
    assert inbox.finish(1, "settled")
    assert dict(inbox.results()) == {2: "kept"}


def test_clear_takes_everything_out() -> None:
    outbox = Outbox()
    for entry in "abc":
        outbox.add(entry)
    outbox.done(2)
    assert outbox.clear() == ["a", "c"] and outbox.floor == 4 and outbox.oldest() is None
