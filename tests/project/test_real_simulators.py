"""Real simulators behind the bridge, each in its own environment: they keep the contract, and the bits are theirs."""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.conformance.bench import random_actions
from cosmos_actor.simulator_bridge.contract import WorkUnit
from cosmos_actor.simulator_bridge.gateway import AttachedSimulator, Gateway
from cosmos_actor.simulator_bridge.plugins import SimulatorName
from tests.interpreters import require_python
from tests.project.conftest import clean_environment
from tests.project.environments import made
from tests.project.programs.plain_episodes import digest
from tests.project.source import ROOT
from tests.project.test_libero import PICTURES
from tests.simulator_bridge.driver import assigned, make_keys
from tests.simulator_bridge.driving import attached, by_lane, driving

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900), pytest.mark.components]
INSTALL_S, RUN_S = 800, 400
ENVIRONMENTS = {"gymnasium": "", "robotics": "", "metaworld": "3.10"}
"""Of `make .venv-sims-NAME/.stamp`: which Python; empty: this one."""
EPISODES, SLOTS, STEPS = 5, 2, 100
HELD_STEPS = 4
CONFORMANCE = """
import sys
from cosmos_actor.simulator_bridge.conformance import of_process, of_slots
of_process.MEMORY_S, of_process.OPENED_S, of_slots.END_S = 10.0, 10.0, 5.0  # some reset in half a second
from cosmos_actor.cli import main
sys.exit(main())
"""
EXPERT = "the expert acts within its bounds"
HAS_NOT = {"initial states differ", "the embodiment fits", EXPERT}
NO_END = "an ended slot stays as it was"
SLOW = {"memory does not grow", NO_END}


@dataclass(frozen=True)
class Case:
    environment: str
    kind: str
    """Without `gymnasium:`."""
    may_skip: set[str] = field(default_factory=set)
    """Checks with nothing to look at, besides HAS_NOT."""
    module: str = ""
    """What a plain program imports before `gymnasium.make`."""
    draws: bool = False
    made_with: dict[str, Any] = field(default_factory=dict)
    """What the adapter adds to the options."""


PIXELS = "wrappers=minigrid.wrappers:RGBImgObsWrapper(tile_size=8),minigrid.wrappers:ImgObsWrapper"
WRAPPERS = [("minigrid.wrappers", "RGBImgObsWrapper", {"tile_size": 8}), ("minigrid.wrappers", "ImgObsWrapper", {})]
CASES = [
    Case("gymnasium", "CliffWalking-v1", {"different seeds differ", NO_END}),
    Case("gymnasium", "LunarLander-v3", {NO_END}),
    Case("gymnasium", "BipedalWalker-v3", {NO_END}),
    Case("gymnasium", "HalfCheetah-v5", {NO_END}),
    Case("gymnasium", "InvertedPendulum-v5?render_mode=rgb_array", SLOW, draws=True),
    Case("gymnasium", "ALE/Pong-v5", SLOW, "ale_py"),
    Case("gymnasium", "MiniGrid-Empty-8x8-v0?" + PIXELS, {"different seeds differ", NO_END}, "minigrid"),
    Case("gymnasium", "BabyAI-GoToRedBall-v0", {NO_END}, "minigrid"),
    Case("robotics", "FetchReach-v4", {NO_END}, "gymnasium_robotics"),
    Case("metaworld", "Meta-World/MT1?env_name=reach-v3", SLOW, "metaworld", made_with={"seed": 0}),
]


@pytest.fixture(scope="module")
def pythons() -> dict[str, Path]:
    """Of the environments, made side by side where they are not there yet."""

    def make(name: str) -> Path:
        python = require_python(ENVIRONMENTS[name]) if ENVIRONMENTS[name] else sys.executable
        return made(f"sims-{name}", INSTALL_S, SIMS_PYTHON=python)

    with ThreadPoolExecutor(len(ENVIRONMENTS)) as pool:
        return dict(zip(ENVIRONMENTS, pool.map(make, ENVIRONMENTS), strict=True))


@pytest.fixture(params=CASES, ids=lambda case: case.kind.partition("?")[0])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.draws and ctypes.util.find_library("OSMesa") is None:
        reason = f"its pictures need libOSMesa: apt-get install {PICTURES}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return request.param


def environment() -> dict[str, str]:
    """Nothing of a screen: the adapter is to find out how MuJoCo draws here."""
    kept = {name: value for name, value in clean_environment().items()
            if name not in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run(command: list[Any], limit_s: float, cwd: Path, **more: str) -> str:
    """stdout of a command that must succeed. The cosmos_actor of these environments is this checkout."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, timeout=limit_s, capture_output=True, text=True,
                          env={**environment(), **more}, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_it_keeps_what_is_asked_of_a_simulator(case: Case, pythons: dict[str, Path], tmp_path: Path) -> None:
    command = [pythons[case.environment], "-c", CONFORMANCE, "sim", "test", "gymnasium:" + case.kind, "--json"]
    told = json.loads(run([*command, "--steps", "20"], RUN_S, tmp_path))
    assert told["passed"], told
    skipped = {check["check"]: check["seen"] for check in told["checks"] if check["status"] == "skipped"}
    assert set(skipped) <= HAS_NOT | case.may_skip, skipped
    assert (EXPERT in skipped) is (case.environment != "metaworld")


def test_its_episodes_are_the_same_bytes_over_the_bridge(
    case: Case, pythons: dict[str, Path], tmp_path: Path, popen: Callable[..., subprocess.Popen[Any]]
) -> None:
    name = SimulatorName.parse(f"gymnasium:{case.kind}", {"max_episode_steps": STEPS})
    seeds, told, actions = [100 + number for number in range(EPISODES)], [], []

    async def play(gateway: Gateway, address: str) -> None:
        popen([pythons[case.environment], "-m", "cosmos_actor.cli", "attach", str(name), "--connect", address,
               "--key", keys["simulator"], "--envs", str(SLOTS)], cwd=tmp_path, env=environment())
        while not gateway.present:  # some take long to import; `driving` ends it
            await asyncio.sleep(0.05)
        simulator = await attached(gateway)
        for seed in seeds:
            drawn = random_actions(simulator.description.action, STEPS // HELD_STEPS, np.random.default_rng(seed))
            actions.append(np.repeat(drawn, HELD_STEPS, axis=0))
        begun = time.perf_counter()
        told.extend(await episodes(simulator, seeds, actions))
        steps = sum(len(episode) - 1 for episode in told)
        print(f"\n{case.kind}: {steps} steps, {steps / (time.perf_counter() - begun):.0f} steps/s through the bridge, "
              f"resets included; {dict(sorted(simulator.description.libraries.items()))}")
        assert by_lane(simulator) > 0

    keys = make_keys(tmp_path / "keys")
    driving(keys, play)
    options = {**case.made_with, **{key: value for key, value in name.options.items() if key != "wrappers"}}
    asked = {"id": name.id, "module": case.module, "options": options, "seeds": seeds,
             "wrappers": WRAPPERS if "wrappers" in name.options else []}
    np.save(tmp_path / "actions.npy", np.stack(actions))
    program = ROOT / "tests/project/programs/plain_episodes.py"
    draws_with = {"MUJOCO_GL": "egl" if os.path.exists("/dev/nvidiactl") else "osmesa"} if case.draws else {}
    theirs = run([pythons[case.environment], program, json.dumps(asked), "actions.npy"], RUN_S, tmp_path, **draws_with)
    assert told == json.loads(theirs)


async def episodes(simulator: AttachedSimulator, seeds: list[int], actions: list[Any]) -> list[list[str]]:
    """Digests of all that was seen, for each episode. Slots take them in turn, with the next one queued."""
    units = [WorkUnit(f"episode {seed}", simulator.description.tasks[0].name, seed) for seed in seeds]
    playing = dict(enumerate(range(SLOTS)))  # slot -> which episode
    waiting = list(range(SLOTS, EPISODES))
    queued: dict[int, int] = {}
    stepped = await simulator.reset(assigned({slot: units[one] for slot, one in playing.items()}), deadline_s=60.0)
    told: list[list[str]] = [[] for _ in units]
    for row, slot in enumerate(stepped.slots.tolist()):
        told[playing[slot]].append(digest(of_row(stepped.observations, row)))
    while playing:
        slots = sorted(playing)
        new = {slot: waiting.pop(0) for slot in slots if slot not in queued and waiting}
        queued.update(new)
        chosen = np.stack([actions[playing[slot]][len(told[playing[slot]]) - 1] for slot in slots])
        stepped = await simulator.step(slots, chosen[:, None], deadline_s=60.0,
                                       queue=assigned({slot: units[one] for slot, one in new.items()}))
        assert stepped.failures == []
        ended = stepped.ended.tolist()
        for row, slot in enumerate(stepped.slots.tolist()):
            last = of_row(stepped.final_observations, ended.index(slot)) if slot in ended else None
            shown = of_row(stepped.observations, row)
            told[playing[slot]].append(digest(shown if last is None else last, stepped.rewards[row, 0],
                                              stepped.terminated[row], stepped.truncated[row]))
            if last is None:
                continue
            del playing[slot]
            if slot in queued:
                playing[slot] = queued.pop(slot)
                told[playing[slot]].append(digest(shown))
    return told


def of_row(observations: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    return {name: np.copy(array[row]) for name, array in observations.items()}
