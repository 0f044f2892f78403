from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus import Limits
from cosmos_actor.bus.liveness import Liveness
from tests.bus.messages import Number
from tests.bus.world import World

INTERVAL_S, LOST_S = 1.0, 10.0


def watched() -> Liveness:
    return Liveness(0.0, interval_s=INTERVAL_S, lost_after_s=LOST_S)


def silence(liveness: Liveness, begin: float, end: float) -> str | None:
    """Look every half second; the first verdict."""
    now = begin
    while now <= end:
        liveness.look(now)
        if liveness.lost(now):
            return liveness.lost(now)
        now += 0.5
    return None


@given(st.floats(0.0, 9.9))
def test_less_silence_than_the_limit_is_no_loss(seconds: float) -> None:
    liveness = watched()
    liveness.heard(5.0)
    assert silence(liveness, 5.0, 5.0 + seconds) is None


def test_silence_of_the_limit_is_a_loss_that_names_the_setting() -> None:
    assert silence(watched(), 0.0, 30.0) == "no frame for 10.0 s (bus.lost_after_s is 10)"


@given(st.floats(3.0, 10_000.0))
def test_our_own_stall_is_not_held_against_the_peer(stall_s: float) -> None:
    liveness = watched()
    liveness.look(0.5)
    resumed = 0.5 + stall_s
    liveness.look(resumed)
    assert liveness.lost(resumed) is None
    assert silence(liveness, resumed, resumed + LOST_S + 3) is not None


def test_a_declared_pause_counts_from_its_end() -> None:
    liveness = watched()
    liveness.pulse(0.0, 7, 60.0, "compiling")
    assert silence(liveness, 0.0, 69.5) is None
    assert silence(liveness, 70.0, 71.0) == "no frame for 10.0 s after its pause for compiling (bus.lost_after_s is 10)"
    assert liveness.progress == 7


def test_a_pause_can_be_taken_back() -> None:
    liveness = watched()
    liveness.pulse(0.0, 1, 60.0, "compiling")
    liveness.pulse(1.0, 2, 0.0, "")
    assert liveness.statistics(1.0) == {"silent_s": 0.0, "progress": 2, "busy_s": 0.0, "busy": ""}
    assert silence(liveness, 1.0, 12.0) is not None


def test_a_heartbeat_is_due_once_an_interval() -> None:
    liveness = watched()
    assert [liveness.due(now) for now in (0.0, 0.5, 0.9, 1.0, 1.1, 2.5)] == [True, False, False, True, False, True]


def test_silence_is_excused_until_a_declared_pause_is_over() -> None:
    liveness = watched()
    liveness.pulse(1.0, 5, 10.0, "a compile")
    assert [liveness.unexcused_s(now) for now in (5.0, 11.0, 13.0)] == [0.0, 0.0, 2.0]
    assert liveness.silent_s(13.0) == 12.0


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_step_of_the_wall_clock_is_not_noticed(
    zmq_world: World, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """An hour forwards or back, as an NTP client may set it: no peer is lost, no deadline fires."""

    async def scenario(world: World) -> None:
        near, far, link = await world.pair(
            prepare=lambda bus: bus.serve(Number, lambda message, link: Number(message.value + 1)),
            limits=Limits(heartbeat_interval_s=0.05, lost_after_s=1.0))
        assert await link.call(Number(1), deadline_s=5) == Number(2)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + step_s)
        await asyncio.sleep(0.3)
        assert link.lost is None and link.wires_used == 1
        assert await link.call(Number(2), deadline_s=5) == Number(3)
        monkeypatch.undo()

    zmq_world.run(scenario)
