"""A simulator on a real bus: it attaches, serves, comes back and leaves; and the ends that only a person can mend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.bus import PeerRefused, RemoteError
from cosmos_actor.bus.handshake import KEY_NOT_LISTED, WRONG_SERVER_KEY
from cosmos_actor.bus.keys import KeyRing
from cosmos_actor.simulator_bridge import server
from cosmos_actor.simulator_bridge.contract import ArraySpec, Description, Environment
from cosmos_actor.simulator_bridge.server import FAILED, MISTAKE, OVER, TOO_LARGE, Ending, Place, after, final
from tests.simulator_bridge.driver import Attaching, Driver, eventually, make_keys, scenario
from tests.simulator_bridge.worlds import Counter, CounterSimulator, unit

Keys = "dict[str, Path]"


@pytest.fixture
def short_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DIAL_S", 0.3)


def test_it_attaches_and_serves(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        simulator = Attaching(address, keys["simulator"])
        offer = await driver.attached()
        assert (offer.envs, offer.description.simulator) == (2, "counter:1")
        first = await driver.reset({0: unit(seed=1), 1: unit(seed=2)}, queue={0: unit(seed=3)})
        assert first.observations["count"].tolist() == [[1, 0], [2, 0]]
        stepped = await driver.step([1, 0], [[1, 1, 1, 1], [3, 3, 3, 3]])
        assert stepped.observations["count"].tolist() == [[2, 4], [3, 0]]
        assert stepped.ended.tolist() == [0] and stepped.seconds > 0
        await driver.bus.close()
        assert await simulator.ending() == Ending(OVER, "the run is over: it said goodbye: closed")

    scenario(keys, play)


def test_a_fault_is_an_answer_and_a_senseless_request_an_error(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        Attaching(address, keys["simulator"])
        await driver.attached()
        await driver.reset({0: unit("raise in step"), 1: unit(seed=2)})
        stepped = await driver.step([0, 1], [[1, 1], [1, 1]])
        assert [(one.slot, one.kind) for one in stepped.failures] == [(0, "step")]
        with pytest.raises(RemoteError, match="BadRequest: slots .0. are idle"):
            await driver.step([0], [[1]])
        assert (await driver.step([1], [[1]])).observations["count"].tolist() == [[2, 3]]

    scenario(keys, play)


def test_a_cut_connection_loses_nothing(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        simulator = Attaching(address, keys["simulator"])
        await driver.attached()
        await driver.reset({0: unit(seed=1)})
        for count in (1, 2, 3):
            cut(simulator)
            assert (await driver.step([0], [[1]])).observations["count"].tolist() == [[1, count]]
        assert simulator.server.lives == 1

    scenario(keys, play)


def test_a_lost_link_is_a_new_life_with_the_worlds_as_they_were(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        simulator = Attaching(address, keys["simulator"])
        first = await driver.attached()
        await driver.reset({0: unit(seed=1)})
        answered = await driver.step([0], [[2]])
        old = driver.links[-1].peer
        driver.bus.forget(old.actor, old.incarnation, "lost by the test")
        second = await driver.attached(2)
        assert second.session == first.session
        assert driver.links[-1].peer.incarnation != old.incarnation
        driver.number -= 1  # nobody knows whether the answer to the last one arrived: it is asked again
        again = await driver.step([0], [[2]])
        assert again.observations["count"].tolist() == answered.observations["count"].tolist() == [[1, 2]]
        assert (await driver.step([0], [[1]])).observations["count"].tolist() == [[1, 3]]
        assert any("back to rollout-0" in line for line in simulator.lines)

    scenario(keys, play)


def test_a_driver_that_does_not_know_it_any_more_finds_idle_slots_and_counts_anew(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        Attaching(address, keys["simulator"])
        await driver.attached()
        await driver.reset({0: unit(seed=1), 1: unit(seed=1)})
        driver.known.clear()
        old = driver.links[-1].peer
        driver.bus.forget(old.actor, old.incarnation, "forgotten by the test")
        await driver.attached(2)
        assert (await driver.reset({0: unit(seed=5)})).number == 1
        with pytest.raises(RemoteError, match="idle"):
            await driver.step([1], [[1]])

    scenario(keys, play)


@pytest.mark.usefixtures("short_dials")
def test_a_driver_that_comes_late_is_waited_for(keys: Keys) -> None:
    async def play(early: Driver, address: str) -> None:
        await early.bus.close(0)
        simulator = Attaching(address, keys["simulator"])
        await eventually(lambda: simulator.lines, "it says that it tries")
        assert "no rollout at tcp://" in simulator.lines[0] and "trying for 10 s" in simulator.lines[0]
        driver = Driver(keys)
        await driver.bus.start(address)
        try:
            await driver.attached()
        finally:
            await driver.bus.close(0)
        await simulator.ending()

    scenario(keys, play)


@pytest.mark.usefixtures("short_dials")
def test_a_driver_that_does_not_come_is_given_up(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        await driver.bus.close(0)
        ending = await Attaching(address, keys["simulator"], rejoin_s=0).ending()
        assert ending.code == FAILED
        assert "no rollout at tcp://" in ending.line

    scenario(keys, play)


def test_it_leaves_when_asked(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        simulator = Attaching(address, keys["simulator"])
        await driver.attached()
        simulator.server.leave(Ending(OVER, "asked by SIGTERM"))
        assert await simulator.ending() == Ending(OVER, "asked by SIGTERM")
        assert driver.left == ["asked by SIGTERM"]

    scenario(keys, play)


@pytest.mark.usefixtures("short_dials")
def test_it_leaves_while_it_looks_for_its_driver(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        await driver.bus.close(0)
        simulator = Attaching(address, keys["simulator"])
        await eventually(lambda: simulator.lines, "it has looked once")
        simulator.server.leave(Ending(OVER, "asked by SIGINT"))
        assert (await simulator.ending()).code == OVER

    scenario(keys, play)


def test_a_refusal_is_the_end(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        driver.refusal = "its embodiment differs: cameras[0].rotation is 0, here 180"
        ending = await asyncio.wait_for(Attaching(address, keys["simulator"]).ending(), 5.0)
        assert ending.code == MISTAKE
        assert ending.line == f"{address} refuses it: {driver.refusal}"

    scenario(keys, play)


def test_an_actor_that_drives_no_simulators_is_named(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        driver.bus.handlers.requests.pop("sim_attach")
        ending = await asyncio.wait_for(Attaching(address, keys["simulator"]).ending(), 5.0)
        assert ending.code == MISTAKE
        assert f"{address} drives no simulators" in ending.line

    scenario(keys, play)


def test_a_key_of_another_run_is_told_within_5_s(keys: Keys, tmp_path: Path) -> None:
    async def play(driver: Driver, address: str) -> None:
        other = make_keys(tmp_path / "other")
        ending = await asyncio.wait_for(Attaching(address, other["simulator"]).ending(), 5.0)
        assert ending.code == MISTAKE
        assert f"--key is not of the run behind {address}" in ending.line

    scenario(keys, play)


def test_two_of_one_name_do_not_chase_each_other_away_for_ever(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        first = Attaching(address, keys["simulator"])
        await driver.attached()
        second = Attaching(address, keys["simulator"])
        ending = await first.ending()
        assert ending == Ending(MISTAKE, "another process has attached as sim-0: give each its own --name")
        await driver.reset({0: unit()})
        assert not second.task.done()

    scenario(keys, play)


def test_it_leaves_when_it_has_grown_too_large(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        simulator = Attaching(address, keys["simulator"], max_memory_bytes=1 << 20)
        await driver.attached()
        assert (await driver.reset({0: unit(seed=3)})).observations["count"].tolist() == [[3, 0]]
        ending = await simulator.ending()
        assert ending.code == TOO_LARGE
        assert "--max-memory-mb (sim.max_memory_mb) is 1" in ending.line
        assert driver.left == [ending.line]

    scenario(keys, play)


class Film(Environment):
    """Sees pictures that no message holds."""

    def reset(self, item: Any) -> None:
        self.seed = item.seed

    def step(self, action: Any) -> tuple[float, bool, bool]:
        return 0.0, False, False

    def observe(self) -> dict[str, np.ndarray]:
        return {"image": np.full((512, 512, 3), self.seed, np.uint8)}


class FilmSimulator(CounterSimulator):
    def describe(self) -> Description:
        told = super().describe()
        return Description("film", told.tasks, {"image": ArraySpec("uint8", (512, 512, 3))}, told.action)


def test_pictures_larger_than_a_message_arrive_on_one_host(keys: Keys) -> None:
    async def play(driver: Driver, address: str) -> None:
        Attaching(address, keys["simulator"], simulator=FilmSimulator("film", Film))
        await driver.attached()
        images = (await driver.reset({0: unit(seed=7), 1: unit(seed=9)})).observations["image"]
        assert images.shape == (2, 512, 512, 3)
        assert [int(image.min()) for image in images] == [7, 9] == [int(image.max()) for image in images]

    scenario(keys, play)


def test_pictures_larger_than_a_message_are_refused_between_hosts(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(driver: Driver, address: str) -> None:
        monkeypatch.setattr("cosmos_actor.simulator_bridge.server.host_id", lambda: "another host")
        ending = await Attaching(address, keys["simulator"], simulator=FilmSimulator("film", Film)).ending()
        assert ending.code == MISTAKE
        assert "raise its bus.max_message_bytes or lower --envs" in ending.line

    scenario(keys, play)


def test_after_it_was_attached_a_stranger_at_the_address_may_pass(keys: Keys) -> None:
    place = Place("tcp://h:1", "sim-0", KeyRing.load(keys["simulator"]), 10.0)
    refused = PeerRefused(WRONG_SERVER_KEY)
    assert final(refused, place, attached=True) is None
    for reason in (WRONG_SERVER_KEY, KEY_NOT_LISTED, "other run: we are a, the peer is b"):
        ending = final(PeerRefused(reason), place, attached=False)
        assert ending is not None and ending.code == MISTAKE
    assert after("no frame for 10.0 s", place) is None


def cut(simulator: Attaching) -> None:
    """As a pulled plug would."""
    for dialler in list(simulator.server._bus.diallers):
        if dialler._wire is not None:
            dialler._wire._down("cut by the test", False)


def test_what_may_be_slow_is_announced_before_it_begins_and_taken_back(keys: Keys) -> None:
    announced: list[tuple[str, bool]] = []

    class Looks(Counter):
        def reset(self, item: Any) -> None:
            bus = simulator.server._bus
            announced.append((bus.busy_label, bus.busy_s(bus.clock.now()) > 0))
            super().reset(item)

    async def play(driver: Driver, address: str) -> None:
        nonlocal simulator
        simulator = Attaching(address, keys["simulator"], simulator=CounterSimulator("looks", Looks), envs=1)
        await driver.attached()
        await driver.reset({0: unit()})
        await driver.reset({0: unit()})
        bus = simulator.server._bus
        assert announced == [("reset count", True), ("", False)]
        assert bus.busy_s(bus.clock.now()) == 0

    simulator: Any = None
    scenario(keys, play)


def test_no_world_sees_a_thread_but_the_main_one(keys: Keys) -> None:
    import threading

    seen: set[bool] = set()

    class Looks(Counter):
        def step(self, action: Any) -> tuple[float, bool, bool]:
            seen.add(threading.current_thread() is threading.main_thread())
            return super().step(action)

    async def play(driver: Driver, address: str) -> None:
        Attaching(address, keys["simulator"], simulator=CounterSimulator("looks", Looks))
        await driver.attached()
        await driver.reset({0: unit()})
        await driver.step([0], [[1]])
        assert seen == {True}

    scenario(keys, play)
