"""Turns on a device: one side at a time, in the order of asking, and everything that is asked comes to its turn."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.job.turns import POLICY, ROLLOUT, Begin, Decision, HandOver, Side, Turns

SIDES = st.sampled_from([POLICY, ROLLOUT])


class Schedule:
    """Does what the core decides, and says what it did. Checks after each event what must always hold."""

    def __init__(self, turn: Side | None = POLICY) -> None:
        self.turns = Turns(turn)
        self.sides: dict[int, Side] = {}
        self.waiting: list[int] = []
        self.held: list[int] = []
        self.begun: list[int] = []
        self.moving: Side | None = None
        self.moves = 0

    def ask(self, ticket: int, side: Side) -> None:
        self.sides[ticket] = side
        self.waiting.append(ticket)
        self._do(self.turns.asked(ticket, side))

    def end(self, ticket: int) -> None:
        for table in (self.waiting, self.held):
            if ticket in table:
                table.remove(ticket)
        self._do(self.turns.ended(ticket))

    def moved(self) -> None:
        assert self.moving is not None
        side, self.moving = self.moving, None
        self._do(self.turns.handed(side))

    def fail(self) -> None:
        assert self.moving is not None
        self.moving = None
        self.turns.failed()
        for ticket in list(self.waiting):  # the shell tells them
            self.end(ticket)

    def _do(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, HandOver):
                assert self.moving is None and not self.held, "a hand-over while somebody holds the device"
                self.moving = decision.to
                self.moves += 1
            else:
                assert isinstance(decision, Begin) and self.moving is None
                for ticket in decision.tickets:
                    older = self.waiting[:self.waiting.index(ticket)]
                    assert not older, "an older one waits still"
                    self.waiting.remove(ticket)
                    self.held.append(ticket)
                    self.begun.append(ticket)
        assert len({self.sides[ticket] for ticket in self.held}) <= 1, "both sides hold the device"
        assert self.turns.held == set(self.held)
        if self.held:
            assert self.turns.turn == self.sides[self.held[0]]

    def until_all_had_their_turn(self) -> None:
        """The device moves and holders end, the oldest first; it must come to an end."""
        for _ in range(10 * len(self.sides) + 10):
            if self.moving is not None:
                self.moved()
            elif self.held:
                self.end(self.held[0])
            else:
                break
        assert not self.waiting and not self.held and self.moving is None


@given(st.data())
def test_over_random_schedules_one_side_holds_the_device_and_nobody_waits_for_ever(data):
    schedule = Schedule(data.draw(st.sampled_from([POLICY, ROLLOUT, None])))
    for ticket in range(data.draw(st.integers(1, 25))):
        schedule.ask(ticket, data.draw(SIDES))
        for _ in range(data.draw(st.integers(0, 3))):
            what = data.draw(st.sampled_from(["end", "give up", "moved", "fail"]))
            if what == "end" and schedule.held:
                schedule.end(data.draw(st.sampled_from(schedule.held)))
            elif what == "give up" and schedule.waiting:
                schedule.end(data.draw(st.sampled_from(schedule.waiting)))
            elif schedule.moving is not None and what in ("moved", "fail"):
                getattr(schedule, what)()
    schedule.until_all_had_their_turn()


@given(st.lists(SIDES, min_size=1, max_size=30))
def test_all_begin_in_the_order_of_asking_and_the_device_moves_once_for_each_change_of_sides(sides):
    schedule = Schedule(POLICY)
    for ticket, side in enumerate(sides):
        schedule.ask(ticket, side)
    schedule.until_all_had_their_turn()
    assert schedule.begun == list(range(len(sides)))
    assert schedule.moves == sum(one != other for one, other in zip([POLICY, *sides], sides, strict=False))


def test_who_has_the_turn_goes_on_side_by_side_until_the_other_asks():
    schedule = Schedule(ROLLOUT)
    schedule.ask(0, ROLLOUT)
    schedule.ask(1, ROLLOUT)
    assert schedule.held == [0, 1] and not schedule.moves
    schedule.ask(2, POLICY)
    schedule.ask(3, ROLLOUT)  # it would never end if those who have the turn always went first
    assert schedule.held == [0, 1]
    schedule.end(0)
    assert schedule.moving is None
    schedule.end(1)
    assert schedule.moving == POLICY
    schedule.moved()
    assert schedule.held == [2]
    schedule.end(2)
    schedule.moved()
    assert schedule.held == [3]


def test_after_a_hand_over_that_failed_the_next_that_asks_begins_another():
    schedule = Schedule(POLICY)
    schedule.ask(0, ROLLOUT)
    schedule.fail()
    assert schedule.turns.turn is None
    schedule.ask(1, POLICY)
    assert schedule.moving == POLICY  # nobody has it: whose turn it was last is not known any more
    schedule.moved()
    assert schedule.held == [1]


def test_what_is_not_wanted_any_more_holds_nobody_up():
    schedule = Schedule(POLICY)
    schedule.ask(0, POLICY)
    schedule.ask(1, ROLLOUT)
    schedule.ask(2, POLICY)
    assert schedule.held == [0]
    schedule.end(1)
    assert schedule.held == [0, 2] and not schedule.moves
    assert schedule.turns.ended(99) == []
