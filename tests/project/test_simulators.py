"""Simulators attach from environments of their own: the wheel, three libraries, and a gymnasium of their time."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.contract import WorkUnit
from cosmos_actor.simulator_bridge.gateway import Gateway
from tests.interpreters import require_python
from tests.project.conftest import clean_environment, run
from tests.project.source import ROOT
from tests.simulator_bridge.driver import Driver, assigned, make_keys, scenario
from tests.simulator_bridge.driving import attached, by_lane, driving, plain, step

LONGEST_TEST_S = 900
PYTHONS = ["3.8", "new"]
EPISODES, SLOTS = 20, 4
TESTED_IN_IT = ("__init__.py", "test_gymnasium_adapter.py")


@pytest.fixture(scope="module", params=PYTHONS)
def simulators_python(request: pytest.FixtureRequest, make_environment: Callable[..., Path]) -> Path:
    """CPython 3.8 with numpy 1.22 and gymnasium 0.29; this Python with gymnasium 1.x. Nothing of `cli`."""
    if request.param == "3.8":
        return make_environment(require_python("3.8"), "constraints-py38.txt", "gymnasium")
    return make_environment(sys.executable, "constraints.txt", "gymnasium>=1")


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_cartpole_plays_its_episodes(
    simulators_python: Path, tmp_path: Path, popen: Callable[..., subprocess.Popen[Any]]
) -> None:
    keys = make_keys(tmp_path / "keys")

    async def play(driver: Driver, address: str) -> None:
        process = popen(
            [simulators_python.parent / "cosmos-actor", "attach", "gymnasium:CartPole-v1", "--connect", address,
             "--key", keys["simulator"], "--envs", str(SLOTS), "--name", "cartpole-0"],
            cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        offer = await driver.attached()
        assert not offer.python.startswith("3.8") or offer.description.libraries["numpy"] == "1.22.4"
        assert await episodes(driver) == EPISODES
        await driver.bus.close()
        out, err = await asyncio.get_running_loop().run_in_executor(None, process.communicate)
        assert (process.returncode, out) == (0, ""), err
        assert "cartpole-0: the run is over" in err

    scenario(keys, play)


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_steps_past_the_bus_are_the_same_to_the_last_bit(
    simulators_python: Path, tmp_path: Path, popen: Callable[..., subprocess.Popen[Any]]
) -> None:
    keys, told = make_keys(tmp_path / "keys"), []

    async def play(gateway: Gateway, address: str) -> None:
        popen([simulators_python.parent / "cosmos-actor", "attach", "gymnasium:CartPole-v1", "--connect", address,
               "--key", keys["simulator"], "--envs", str(SLOTS)], cwd=tmp_path, env=clean_environment())
        simulator = await attached(gateway, lane=not told)
        units = {slot: WorkUnit("first", "CartPole-v1", slot) for slot in simulator.slots}
        steps = [await simulator.reset(assigned(units), deadline_s=30.0)]
        random = np.random.default_rng(0)
        for number in range(100):
            queue = {slot: WorkUnit(f"next {number}", "CartPole-v1", number) for slot in simulator.slots}
            steps.append(await step(simulator, random.integers(0, 2, (SLOTS, 2)), queue=assigned(queue)))
        assert by_lane(simulator) == (0 if told else 100)
        told.append([plain(stepped) for stepped in steps])

    driving(keys, play)
    driving(keys, play, shared_bytes=0)
    assert told[0] == told[1]


async def episodes(driver: Driver) -> int:
    """Play EPISODES of them, each queued for the slot that is free next; how many ended, all without a failure."""
    units = [WorkUnit(f"episode {seed}", "CartPole-v1", seed) for seed in range(EPISODES)]
    running, waiting = dict(enumerate(units[:SLOTS])), units[SLOTS:]
    queue = {slot: waiting.pop(0) for slot in running}
    stepped = await driver.reset(running, queue)
    random = np.random.default_rng(0)
    ended = 0
    while running:
        slots = sorted(running)
        queued = {slot: waiting.pop(0) for slot in slots if slot not in queue and waiting}
        queue.update(queued)
        stepped = await driver.step(slots, random.integers(0, 2, (len(slots), 1)), assigned(queued))
        assert stepped.failures == []
        for slot in stepped.ended.tolist():
            ended += 1
            del running[slot]
            if slot in queue:
                running[slot] = queue.pop(slot)
    return ended


@pytest.mark.heavy
@pytest.mark.timeout(LONGEST_TEST_S)
def test_the_adapter_passes_its_tests_there(simulators_python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "simulator_bridge"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    for name in TESTED_IN_IT:
        shutil.copy(ROOT / "tests" / "simulator_bridge" / name, folder / name)
    run([simulators_python, "-m", "pip", "install", "-q", "pytest"], cwd=tmp_path, timeout=300)
    done = run([simulators_python, "-m", "pytest", "-q", "tests"], cwd=tmp_path, timeout=300)
    assert " passed" in done and " skipped" not in done
