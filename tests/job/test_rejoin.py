"""A joined actor that loses its run begins a new life when the run can be reached again; one that is over is over."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from cosmos_actor.actors.head import NAME_TAKEN
from cosmos_actor.actors.runtime import HeadLost
from cosmos_actor.bus import DeadlineExceeded, Identity, PeerLost, PeerRefused
from cosmos_actor.job.rejoin import LeaveAsked, live

FIRST = Identity("run", "rollout", "rollout-far", "1")
NOBODY = DeadlineExceeded("no registry at tcp://h:1 within 20 s")
TAKEN = PeerRefused(f"{NAME_TAKEN} rollout-far already; take another name with --name")


def lost(final: bool = False) -> HeadLost:
    error = HeadLost("the head of the run is gone: silent for 10 s")
    error.final = final
    return error


class Lives:
    """Each life ends as it is written; a second passes with each pause, ten with each life."""

    def __init__(self, *ends: Any) -> None:
        self._ends = list(ends)
        self.asked = LeaveAsked()
        self.asked.pause = self._sleep
        self.identities: list[Identity] = []
        self.now = 0.0
        self.signal_in_pause = False

    def live(self, rejoin_s: float = 300.0) -> int:
        return live(self._life, FIRST, rejoin_s, self.asked, clock=lambda: self.now)

    def _life(self, identity: Identity) -> int:
        self.identities.append(identity)
        self.now += 10.0
        end = self._ends.pop(0)
        if end == "signal":
            self.asked.note()
            end = lost()
        if isinstance(end, Exception):
            raise end
        return int(end)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.signal_in_pause:
            self.asked.note()


def test_each_life_is_another_incarnation_of_the_same_actor(capsys):
    lives = Lives(lost(), NOBODY, TAKEN, PeerLost("the network went before it was announced"), lost(), 0)
    assert lives.live() == 0
    assert len({identity.incarnation for identity in lives.identities}) == 6
    assert {identity.actor for identity in lives.identities} == {"rollout-far"}
    assert capsys.readouterr().err.count("joining again as soon as it can be reached, for 300 s") == 2


@pytest.mark.parametrize("end", [lost(final=True), NOBODY, TAKEN, PeerRefused("other run: we are a, the peer is b")])
def test_a_first_life_that_could_not_join_or_was_told_the_end_has_no_second(end):
    lives = Lives(end)
    with pytest.raises(type(end)):
        lives.live()
    assert len(lives.identities) == 1


def test_a_key_that_the_run_does_not_know_any_more_ends_it():
    lives = Lives(lost(), PeerRefused("key not on the list: the listener does not know our key"))
    with pytest.raises(PeerRefused, match="key not on the list"):
        lives.live()


def test_it_gives_up_when_its_time_is_over():
    lives = Lives(lost(), *[NOBODY] * 10)
    with pytest.raises(DeadlineExceeded):
        lives.live(rejoin_s=60.0)
    assert len(lives.identities) == 1 + 6


def test_without_time_to_join_again_the_first_loss_is_the_end():
    lives = Lives(lost(), 0)
    with pytest.raises(HeadLost):
        lives.live(rejoin_s=0.0)


@pytest.mark.parametrize("ends", [("signal",), (lost(), "signal")])
def test_who_was_asked_to_leave_begins_no_new_life(ends):
    """The signal came while the life was losing its run, so nobody heard it then."""
    lives = Lives(*ends)
    assert lives.live() == 0 and len(lives.identities) == len(ends)


def test_a_signal_between_two_lives_is_heard():
    lives = Lives(lost(), 1)
    lives.signal_in_pause = True
    assert lives.live() == 0 and len(lives.identities) == 1


def test_a_real_signal_between_two_lives_is_noted():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    asked = LeaveAsked()
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        asked.pause(0.3)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert asked
