"""Steps past the bus: the same answers to the last bit, and whatever goes wrong there is asked for by the bus, once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from cosmos_actor.bus import BusError
from cosmos_actor.bus.busy_poll import BusyPoll
from cosmos_actor.simulator_bridge.contract import SimulatorError
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.messages import Assignment, Step, Stepped
from cosmos_actor.simulator_bridge.step_lane import (
    ANSWER,
    ANSWERED,
    LONG_S,
    SHORT_S,
    AskedSteps,
    ServedSteps,
    queued,
    unqueued,
)
from cosmos_actor.simulator_bridge.step_memory import ROOM_FOR_ACTIONS, Answers, placed
from tests.simulator_bridge.driver import Attaching, assigned, eventually
from tests.simulator_bridge.driving import attached, by_lane, driving, plain, step
from tests.simulator_bridge.worlds import Counter, CounterSimulator, unit

ROOT = Path(__file__).parents[2]
Keys = "dict[str, Path]"
DESCRIPTION = CounterSimulator("counter:1").describe()


async def long_play(simulator: AttachedSimulator) -> list[Any]:
    """Chunks of several lengths, of all slots and of some, episodes that end, queued units, faults, resets."""
    draw, told = np.random.default_rng(3), []
    first = {slot: unit(seed=slot, max_steps=9 + slot) for slot in simulator.slots}
    told.append(await simulator.reset(assigned(first), deadline_s=10.0, queue=assigned({0: unit(seed=50)})))
    for number in range(60):
        slots = simulator.slots if number % 3 else [2, 0]
        actions = draw.integers(0, 4, (len(slots), 1 + number % 4))
        wrong = "nan" if 20 <= number < 30 else "raise in reset" if 40 <= number < 45 else "count"
        queue = {slot: unit(wrong, seed=100 + number) for slot in slots}
        told.append(await step(simulator, actions, slots, queue=assigned(queue), intermediate=number == 30))
        for failure in told[-1].failures:
            anew = {failure.slot: unit(seed=900 + number)}
            told.append(await simulator.reset(assigned(anew), deadline_s=10.0, queue=assigned(anew)))
    return [plain(stepped) for stepped in told]


def test_it_gives_what_the_bus_gives_to_the_last_bit(keys: Keys) -> None:
    told: list[list[Any]] = []

    async def play(gateway: Gateway, address: str, lane: bool) -> None:
        Attaching(address, keys["simulator"], envs=4)
        simulator = await attached(gateway, lane=lane)
        told.append(await long_play(simulator))
        assert (by_lane(simulator) > 40) is lane

    driving(keys, lambda gateway, address: play(gateway, address, True))
    driving(keys, lambda gateway, address: play(gateway, address, False), shared_bytes=0)
    assert told[0] == told[1]
    assert any(one[-1] for one in told[0]) and any(one[3] for one in told[0])


def test_what_it_can_not_carry_goes_by_the_bus(keys: Keys) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        Attaching(address, keys["simulator"])
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit(), 1: unit(seed=1)}), deadline_s=10.0)
        long = {0: unit("count " + "x" * 5000)}
        for actions, more in (
            (np.zeros((2, 1), np.int32), {}),
            (np.zeros((2, 2), np.int64), {"intermediate": True}),
            (np.zeros((2, 10 * ROOM_FOR_ACTIONS), np.int64), {"queue": assigned({0: unit(), 1: unit(seed=1)})}),
            (np.zeros((2, 1), np.int64), {"queue": assigned(long)}),
        ):
            await step(simulator, actions, **more)
        assert by_lane(simulator) == 0
        with pytest.raises(SimulatorError, match="actions go from 4 to 4"):
            await step(simulator, [[4], [4]])
        with pytest.raises(SimulatorError, match="there is no slot 2"):
            await step(simulator, [[1]], [2])
        assert (await step(simulator, [[1], [2]])).observations["count"].tolist() == [[0, 1], [1, 2]]
        assert by_lane(simulator) == 1

    driving(keys, play)


def test_who_does_not_wait_for_an_answer_any_more_does_not_get_it_for_another_request(keys: Keys) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        Attaching(address, keys["simulator"], envs=1)
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit()}), deadline_s=10.0)
        for _ in range(5):
            await simulator.reset(assigned({0: unit()}), deadline_s=10.0)
            given_up = asyncio.ensure_future(step(simulator, [[1]]))
            await asyncio.sleep(0)
            given_up.cancel()
            count = (await step(simulator, [[2]])).observations["count"][0, 1]
            assert count in (2, 3)  # the one that was given up was made, or it was not
            assert (await step(simulator, [[3]])).observations["count"][0, 1] == count + 3
        await eventually(lambda: simulator._lane._under_way is None, "the last one was answered")
        before = by_lane(simulator)
        await step(simulator, [[0]])
        assert by_lane(simulator) == before + 1

    driving(keys, play)


def test_a_link_that_ends_in_the_middle_makes_no_step_twice(keys: Keys) -> None:
    class Slow(Counter):
        made = 0

        def step(self, action: Any) -> Any:
            Slow.made += 1
            if Slow.made == 3:
                lose()
            return super().step(action)

    async def play(gateway: Gateway, address: str) -> None:
        nonlocal lose
        Attaching(address, keys["simulator"], simulator=CounterSimulator("slow", Slow), envs=1)
        simulator = await attached(gateway)
        first = simulator._lane

        def lost() -> None:
            peer = simulator.link.peer
            gateway._bus.forget(peer.actor, peer.incarnation, "lost by the test")

        lose = lost
        await simulator.reset(assigned({0: unit(seed=1)}), deadline_s=10.0)
        for count in range(1, 8):
            assert (await step(simulator, [[1]])).observations["count"].tolist() == [[1, count]]
        assert Slow.made == 7 and simulator.statistics()["resumed"] == 1
        assert first.closed and simulator._lane is not first

    lose: Any = None
    driving(keys, play)


def test_an_answer_is_a_word_of_who_gave_it(keys: Keys) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        Attaching(address, keys["simulator"])
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit(), 1: unit()}), deadline_s=10.0)
        await step(simulator, [[1], [1]])
        liveness = simulator.link.liveness
        await eventually(lambda: not liveness.busy_label, "the pause of the first step is taken back")
        liveness._heard = liveness._busy_until = liveness._heard - 4.0
        assert simulator.unexcused_s() >= 4.0
        await step(simulator, [[1], [1]])
        assert by_lane(simulator) == 2 and simulator.unexcused_s() < 2.0

    driving(keys, play)


def test_two_simulators_are_waited_for_by_the_loop_that_serves_both(keys: Keys) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        Attaching(address, keys["simulator"], name="sim-0")
        await eventually(lambda: len(gateway.present) == 1, "it attaches")
        assert [one.alone for one in gateway.present] == [True]
        Attaching(address, keys["simulator"], name="sim-1")
        await eventually(lambda: len(gateway.present) == 2, "a second attaches")
        assert [one.alone for one in gateway.present] == [False, False]
        gateway.dismiss(gateway.present[0], "it is not needed")
        assert [one.alone for one in gateway.present] == [True]

    driving(keys, play)


# ---- two processes


def attach(popen: Any, address: str, key: Path, made_by: str = "make:counters") -> subprocess.Popen[str]:
    words = [f"python:tests.simulator_bridge.worlds:{made_by}", "--connect", address, "--key", str(key),
             "--envs", "2", "--name", "sim-0"]
    return popen([sys.executable, "-m", "cosmos_actor.cli", "attach", *words], cwd=str(ROOT),
                 env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_stops_in_the_middle_is_lost(number: signal.Signals, keys: Keys, popen: Any) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        process = attach(popen, address, keys["simulator"])
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit("hang"), 1: unit("hang")}), deadline_s=10.0)
        asked = asyncio.ensure_future(step(simulator, [[1, 1], [1, 1]]))
        await asyncio.sleep(0.05)
        assert not asked.done() and simulator._lane._under_way is not None
        process.send_signal(number)
        try:
            with pytest.raises(SimulatorError) as raised:
                await asked
            assert raised.value.kind == "lost" and simulator._lane is None
        finally:
            process.kill()

    driving(keys, play, resume_s=0.2, silent_s=2.0, lost_after_s=2.0)


def test_one_that_hangs_is_not_waited_for_longer_than_its_deadline(keys: Keys, popen: Any) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        attach(popen, address, keys["simulator"])
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit("hang"), 1: unit()}), deadline_s=10.0)
        await simulator.step([0, 1], np.array([[1], [1]]), deadline_s=10.0)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(SimulatorError, match="within its deadline") as raised:
            await simulator.step([0, 1], np.array([[1], [1]]), deadline_s=0.5)
        assert raised.value.kind == "hang"
        assert 0.4 < asyncio.get_running_loop().time() - begun < 5.0

    driving(keys, play)


def test_steps_go_past_the_bus_from_another_process(keys: Keys, popen: Any) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        attach(popen, address, keys["simulator"])
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit(), 1: unit(seed=1)}), deadline_s=10.0)
        for count in range(1, 6):
            assert (await step(simulator, [[1], [1]])).observations["count"].tolist() == [[0, count], [1, count]]
        assert by_lane(simulator) == 5

    driving(keys, play)


def test_the_loop_of_who_asks_one_step_after_the_other_goes_on_turning(keys: Keys, popen: Any) -> None:
    async def play(gateway: Gateway, address: str) -> None:
        attach(popen, address, keys["simulator"])
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit(), 1: unit(seed=1)}), deadline_s=10.0)
        loop, turns, asked = asyncio.get_running_loop(), [0], [0]

        def turn() -> None:
            turns[0] += 1
            loop.call_later(0.001, turn)

        turn()
        until = loop.time() + 1.0
        while loop.time() < until:
            await step(simulator, [[1], [1]], queue=assigned({0: unit(), 1: unit(seed=1)}))
            asked[0] += 1
        assert by_lane(simulator) == asked[0] and turns[0] > 10

    driving(keys, play)


def test_one_that_is_at_work_is_not_silent(keys: Keys, popen: Any) -> None:
    """Neither in many short calls of one request, nor in a unit that begins within it, nor in one request after another
    that leaves its loop no turn."""
    async def play(gateway: Gateway, address: str) -> None:
        attach(popen, address, keys["simulator"], "slow")
        simulator = await attached(gateway)
        await simulator.reset(assigned({0: unit(), 1: unit(max_steps=12)}), deadline_s=30.0)
        await step(simulator, [[0], [0]])
        await step(simulator, [[0] * 10] * 2)
        await step(simulator, [[0], [0]], queue=assigned({1: unit("slow reset")}))
        for _ in range(5):
            await step(simulator, [[0], [0]])
        assert by_lane(simulator) == 8 and gateway.statistics()["lost"] == 0

    driving(keys, play, silent_s=2.0)


# ---- the ends by themselves


def ends(answer: Callable[[Step], Stepped]) -> tuple[AskedSteps, ServedSteps]:
    """On a running loop."""
    asked = AskedSteps(DESCRIPTION, 2, BusyPoll(0.0))
    served = ServedSteps(DESCRIPTION, 2, answer, BusyPoll(0.0))
    asked.open(served.offer())
    return asked, served


def test_it_is_used_only_when_both_ends_are_open() -> None:
    async def play() -> None:
        asked, served = ends(lambda request: (_ for _ in ()).throw(ValueError))
        request = Step(1, np.zeros((2, 1), np.int64))
        until = asyncio.get_running_loop().time() + 5.0
        assert asked.ask(request, until) is None
        served.open(asked.offer())
        await eventually(lambda: asked._ready, "it has rung")
        assert await asked.ask(request, until) is None  # what raises there is asked for by the bus
        waiting = asked.ask(Step(2, np.zeros((2, 1), np.int64)), until)
        asked.close()
        assert await waiting is None
        served.close()
        assert asked.ask(Step(3, np.zeros((2, 1), np.int64)), until) is None

    asyncio.run(play())


class Counts(BusyPoll):
    def __init__(self) -> None:
        super().__init__(60.0)
        self.spins = self.begins = 0

    def spin(self, ready: Callable[[], Any]) -> bool:
        self.spins += 1
        return bool(ready())

    def begin(self) -> None:
        self.begins += 1


def test_nobody_stays_awake_for_a_step_that_takes_long_or_after_it() -> None:
    async def play() -> None:
        short, long = LONG_S / 2, 2 * LONG_S
        takes = [0.0, short, short, long, long, short, short, short]
        nothing = np.zeros((2, 1), np.float32), np.zeros((2, 5), np.int32)
        seen = {"count": np.zeros((2, 2), np.float32)}
        asked, served = ends(lambda step: Stepped(step.number, seen, *nothing, {}, {}, [], takes[step.number]))
        served.open(asked.offer())
        await eventually(lambda: asked._ready, "it has rung")
        counts = asked._busy_poll = served._busy_poll = Counts()
        told = []
        for number in range(1, 7):
            before = counts.begins, counts.spins
            request = Step(number, np.zeros((2, 1), np.int64))
            assert (await asked.ask(request, asyncio.get_running_loop().time() + 5.0)).number == number
            told.append((counts.begins - before[0], counts.spins - before[1]))
        assert told == [(1, 0), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1)]
        counts.seconds = 0.0  # what follows always comes later than this
        await asked.ask(Step(7, np.zeros((2, 1), np.int64)), asyncio.get_running_loop().time() + 5.0)
        assert counts.spins == sum(spins for _, spins in told)
        asked.close()
        served.close()

    asyncio.run(play())


class Serves(BusyPoll):
    """Whoever waits lets the other end work."""

    def __init__(self, served: ServedSteps) -> None:
        super().__init__(60.0)
        self.served, self.more_s = served, [0.0]

    def spin(self, ready: Callable[[], Any], more_s: float = 0.0) -> bool:
        self.more_s.append(more_s)
        self.served._serve()
        return bool(ready())

    def begin(self) -> None:
        pass


def test_who_waits_for_nobody_else_waits_for_a_short_step_without_the_loop_but_lets_it_turn() -> None:
    async def play() -> None:
        takes = [0.0, SHORT_S / 2, 2 * SHORT_S, 0.0, 0.0, 0.0, 0.0, 0.0]
        nothing = np.zeros((2, 1), np.float32), np.zeros((2, 5), np.int32)
        seen = {"count": np.zeros((2, 2), np.float32)}
        asked, served = ends(lambda step: Stepped(step.number, seen, *nothing, {}, {}, [], takes[step.number]))
        served.open(asked.offer())
        await eventually(lambda: asked._ready, "it has rung")

        async def at_once(number: int, alone: bool = True) -> bool:
            waiting = asked.ask(Step(number, np.zeros((2, 1), np.int64)), asyncio.get_running_loop().time() + 5, alone)
            done = bool(waiting.done())
            assert (await waiting).number == number
            return done

        asked._busy_poll = Serves(served)
        assert not await at_once(1), "the other end is in this process"
        asked._by_loop = False
        assert await at_once(2) and asked._busy_poll.more_s[-1] == SHORT_S / 2
        assert not await at_once(3), "the last step was not short"
        assert not await at_once(4, alone=False), "others are waited for"
        assert await at_once(5)
        asked._turn_due = 0.0
        assert not await at_once(6), "the loop is to turn"
        assert await at_once(7)
        asked.close()
        served.close()

    asyncio.run(play())


@pytest.mark.parametrize("offer", [
    None, [], [1, 2, 3], [os.getpid(), 0, b"x" * 16, 4096, 0], [os.getpid(), -1, b"", 0, 0], ["x"] * 5, {"pid": 1}])
def test_an_offer_that_is_none_is_refused_and_nothing_stays_open(offer: Any) -> None:
    async def play() -> None:
        before = len(os.listdir("/proc/self/fd"))
        end = AskedSteps(DESCRIPTION, 2, BusyPoll(0.0))
        with pytest.raises(BusError):
            end.open(offer)
        end.close()
        end.close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(play())


@pytest.mark.parametrize("garbage", [b"x", ANSWER.pack(1, ANSWERED, 3, 0.0), b"\xff" * 200])
def test_an_answer_that_is_none_closes_it(garbage: bytes) -> None:
    async def play() -> None:
        asked, served = ends(lambda request: None)  # type: ignore[arg-type,return-value]
        asked._ready = True
        waiting = asked.ask(Step(1, np.zeros((2, 1), np.int64)), asyncio.get_running_loop().time() + 5.0)
        served._open(asked.offer(), lambda: None)
        served._ring(garbage)
        assert await waiting is None and asked.closed
        served.close()

    asyncio.run(play())


def test_units_travel_as_they_are() -> None:
    queue = [Assignment(3, unit("count", seed=-5, max_steps=7, attempt=2)), Assignment(0, unit("é", seed=2**63))]
    packed = queued(queue)
    assert packed is not None and unqueued(packed) == queue
    assert queued([Assignment(0, unit(seed=2**70))]) is None
    assert queued([Assignment(0, unit(seed=1.5))]) is None  # type: ignore[arg-type]
    for wrong in (b"\xc1", b"\x91\x91\x01", b"\x91\x01"):
        with pytest.raises((ValueError, TypeError)):
            unqueued(wrong)


def test_arrays_have_places_of_their_own() -> None:
    answers = Answers(DESCRIPTION)
    offsets, end = placed(answers._shapes(2, 3))
    memory = bytearray(end)
    answers.lie_in(memory, 0, end)
    made = answers.of(2, 3)
    arrays = [made.rewards, made.rows, *(array for _, array in [*made.seen, *made.final])]
    for number, array in enumerate(arrays):
        array[:] = number + 1
    assert [set(array.ravel().tolist()) for array in arrays] == [{number + 1} for number in range(len(arrays))]
    assert answers.of(2, 3) is made and answers.of(2, 10**9) is None
