"""Environments of gymnasium as simulators: runs where it is, 0.29 on CPython 3.8 and 1.x on a new one (heavy suite)."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from cosmos_actor.simulator_bridge.checked import CheckedSession
from cosmos_actor.simulator_bridge.contract import (
    BOX,
    DISCRETE,
    FAILURE,
    SUCCESS,
    UNKNOWN,
    ArraySpec,
    NoExpert,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.gymnasium_adapter import GymnasiumWorld, know
from cosmos_actor.simulator_bridge.messages import Assignment, Reset, Step, Stepped
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.plugins import SimulatorName, load

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Odd(gymnasium.Env):
    """Spaces that are not what a policy takes: nested, float64, texts; actions that begin with 3."""

    metadata = {"render_modes": ["rgb_array"]}
    dt = 0.05

    def __init__(self, render_mode: Any = None, told: str = "is_success") -> None:
        self.render_mode, self.told, self.got = render_mode, told, []
        self.observation_space = spaces.Dict({
            "arm": spaces.Dict({"position": spaces.Box(-1.0, 1.0, (3,), np.float64), "open": spaces.Discrete(2)}),
            "camera": spaces.Box(0, 255, (4, 5, 3), np.uint8),
            "mission": spaces.Text(20),
        })
        self.action_space = spaces.Discrete(4, start=3)

    def _seen(self) -> Any:
        arm = {"position": np.full(3, 0.5), "open": 1}
        return {"arm": arm, "camera": np.zeros((4, 5, 3), np.uint8), "mission": "pick"}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        info = {self.told: self.steps >= 2} if self.told else {}
        return self._seen(), float(action), self.steps >= 2, False, info

    def render(self) -> Any:
        return np.full((6, 8, 3), self.steps, np.uint8)


class Arm(gymnasium.Env):
    """Takes float64 and nothing else."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.normal(size=2), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float64 and action.shape == (2,)
        return action, 0.0, False, False, {}


class Pusher(Arm):
    """What an expert acts in."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32))


class Switches(Arm):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.MultiBinary(3)


gymnasium.register("Odd-v0", entry_point=Odd, max_episode_steps=50)
gymnasium.register("Arm-v0", entry_point=Arm)
gymnasium.register("Switches-v0", entry_point=Switches)


class Served:
    """One environment ID behind its checked session."""

    def __init__(self, text: str, envs: int = 1) -> None:
        simulator = load(SimulatorName.parse("gymnasium:" + text))
        self.description = simulator.describe()
        self.task = self.description.tasks[0].name
        self.session = CheckedSession(simulator.open(envs), self.description, envs)
        self.number = 0

    def reset(self, *seeds: int) -> Stepped:
        self.number += 1
        return self.session.answer(Reset(self.number, [
            Assignment(slot, WorkUnit(str(seed), self.task, seed)) for slot, seed in enumerate(seeds)]))

    def step(self, actions: Any) -> Stepped:
        self.number += 1
        actions = np.asarray(actions)
        return self.session.answer(Step(self.number, actions))


def test_cartpole_is_described() -> None:
    told = Served("CartPole-v1").description
    assert told.simulator == "gymnasium:CartPole-v1"
    assert [(task.name, task.max_steps) for task in told.tasks] == [("CartPole-v1", 500)]
    assert told.observations == {"state": ArraySpec("float32", (4,))}
    assert (told.action.kind, told.action.n) == (DISCRETE, 2)
    assert told.libraries["gymnasium"] == gymnasium.__version__


def test_cartpole_is_the_one_of_gymnasium() -> None:
    served, real = Served("CartPole-v1"), gymnasium.make("CartPole-v1")
    first, _ = real.reset(seed=7)
    assert (served.reset(7).observations["state"][0] == first).all()
    random = np.random.default_rng(0)
    over = False
    while not over:
        action = int(random.integers(0, 2))
        observation, reward, terminated, truncated, _ = real.step(action)
        stepped = served.step([[action]])
        assert (stepped.observations["state"][0] == observation).all()
        assert stepped.rewards.tolist() == [[reward]]
        assert (stepped.terminated.tolist(), stepped.truncated.tolist()) == ([terminated], [truncated])
        over = terminated or truncated
    real.close()


def test_the_same_seed_gives_the_same_episode_and_another_one_another() -> None:
    served = Served("CartPole-v1", envs=2)
    first = served.reset(5, 6).observations["state"]
    again = served.reset(5, 5).observations["state"]
    assert (again == first[0]).all() and not (first[0] == first[1]).all()


@pytest.mark.parametrize(("text", "limit"), [("MountainCar-v0", 200), ("MountainCar-v0?max_episode_steps=7", 7)])
def test_its_time_limit_truncates(text: str, limit: int) -> None:
    served = Served(text)
    served.reset(0)
    stepped = served.step(np.ones((1, 300), np.int64))
    assert stepped.steps.tolist() == [limit]
    assert (stepped.terminated.tolist(), stepped.truncated.tolist()) == ([0], [1])


def test_members_of_a_dict_keep_their_names_and_texts_are_left_out() -> None:
    served = Served("Odd-v0")
    assert served.description.observations == {
        "arm.open": ArraySpec("int64", ()), "arm.position": ArraySpec("float32", (3,)),
        "camera": ArraySpec("uint8", (4, 5, 3))}
    stepped = served.reset(0)
    assert stepped.failures == []
    assert stepped.observations["arm.position"].tolist() == [[0.5] * 3]
    assert stepped.observations["arm.open"].tolist() == [1]
    assert served.description.control_hz == 20.0


def test_actions_of_a_discrete_space_begin_where_it_says() -> None:
    served = Served("Odd-v0")
    served.reset(0)
    assert served.step([[0]]).rewards.tolist() == [[3.0]]
    assert served.step([[3]]).rewards.tolist() == [[6.0]]


def test_a_discrete_space_contains_what_it_contained() -> None:
    class Discrete(spaces.Discrete):
        asked = 0

        def contains(self, x: Any) -> bool:
            self.asked += 1
            return bool(super().contains(x))

    space, actions = Discrete(3, start=2), [np.int64(value) for value in (1, 2, 3, 4, 5)]
    inside = [False, True, True, True, False]
    know(space, actions)
    know(space, [np.int64(9)])
    before = space.asked
    assert [space.contains(action) for action in actions] == inside and space.asked == before + 2
    assert [space.contains(np.int64(value)) for value in (1, 2, 3, 4, 5)] == inside
    assert not space.contains("2") and space.contains(2)


@pytest.mark.parametrize(("told", "last"), [("is_success", SUCCESS), ("success", SUCCESS), ("", UNKNOWN)])
def test_success_is_what_the_info_says(told: str, last: int) -> None:
    served = Served(f"Odd-v0?told={told}")
    served.reset(0)
    assert served.step([[0]]).success.tolist() == [FAILURE if told else UNKNOWN]
    assert served.step([[0]]).success.tolist() == [last]


def test_what_it_renders_is_an_image() -> None:
    served = Served("Odd-v0?render_mode=rgb_array")
    assert served.description.simulator == "gymnasium:Odd-v0"
    assert served.description.observations["image"] == ArraySpec("uint8", (6, 8, 3))
    served.reset(0)
    assert (served.step([[0]]).observations["image"] == 1).all()


def test_boxes_of_float64_are_float32_for_the_driver() -> None:
    served = Served("Arm-v0")
    told = served.description
    assert told.observations == {"state": ArraySpec("float32", (2,))}
    assert (told.action.kind, told.action.shape) == (BOX, (2,))
    assert told.action.low == (-1.0, -np.inf) and told.action.high == (1.0, np.inf)
    assert told.tasks[0].max_steps == 0
    served.reset(0)
    assert served.step([[[5.0, 5.0]]]).observations["state"].tolist() == [[1.0, 5.0]]


@pytest.mark.parametrize(("text", "words"), [
    ("CartPol-v1", "CartPole"),
    ("nowhere_at_all:Kitchen-v0", "nowhere_at_all"),
    ("Switches-v0", "action space MultiBinary(3) is not supported: it is to be Discrete, or a Box of floats"),
    ("CartPole-v1?colour=red", "colour"),
])
def test_what_can_not_be_made_is_one_line(text: str, words: str) -> None:
    with pytest.raises(Mistake) as refused:
        Served(text)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_the_environment_that_was_described_is_the_first_one_used() -> None:
    made: list[Odd] = []

    def make(**options: Any) -> Odd:
        made.append(Odd(**options))
        return made[-1]

    gymnasium.register("Counted-v0", entry_point=make)
    Served("Counted-v0", envs=2)
    assert len(made) == 2


class Shifted(gymnasium.ObservationWrapper):
    """Importable by name, and without what gymnasium asks of wrappers that are to be in a spec."""

    def __init__(self, env: Any, by: float = 1.0, times: int = 1) -> None:
        super().__init__(env)
        self.by = by * times
        self.observation_space = spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)

    def observation(self, seen: Any) -> Any:
        return np.asarray(seen, np.float32) + self.by


def doubled(env: Any) -> Any:
    return gymnasium.wrappers.TransformObservation(
        env, lambda seen: seen * 2, *([env.observation_space] if gymnasium.__version__[0] != "0" else []))


def first_seen(name: str) -> Any:
    simulator = load(SimulatorName.parse(name))
    session = simulator.open(2)
    try:
        session.reset([0, 1], [WorkUnit("u", "CartPole-v1", 7), WorkUnit("u", "CartPole-v1", 7)])
        return session.observe([0, 1])["state"]
    finally:
        session.close()


def test_wrappers_are_put_around_every_world_the_first_innermost() -> None:
    here = __name__
    plain = first_seen("gymnasium:CartPole-v1")
    shifted = first_seen(f"gymnasium:CartPole-v1?wrappers={here}:Shifted(by=0.5,times=2),{here}:doubled")
    np.testing.assert_allclose(shifted, (plain + 1) * 2, rtol=1e-6)
    assert (first_seen(f"gymnasium:CartPole-v1?wrappers={here}:doubled,{here}:Shifted") == plain * 2 + 1).all()


@pytest.mark.parametrize(("wrapper", "said"), [
    ("Shifted", "expected MODULE:NAME"),
    ("no_such_module:Shifted", "there is no module no_such_module"),
    ("gymnasium.wrappers:NoSuch", "there is no NoSuch in gymnasium.wrappers"),
    (f"{__name__}:Shifted(by)", "expected NAME=VALUE"),
    (f"{__name__}:Shifted(nothing=1)", "unexpected keyword argument 'nothing'"),
])
def test_a_wrapper_that_is_none_is_a_mistake_in_one_line(wrapper: str, said: str) -> None:
    with pytest.raises(Mistake, match=said) as mistake:
        load(SimulatorName.parse("gymnasium:CartPole-v1?wrappers=" + wrapper))
    assert "\n" not in str(mistake.value)


def test_an_environment_without_an_expert_says_so() -> None:
    simulator = load(SimulatorName.parse("gymnasium:CartPole-v1"))
    assert simulator.describe().expert is False
    session = simulator.open(1)
    session.reset([0], [WorkUnit("u", "CartPole-v1", 0)])
    with pytest.raises(NoExpert):
        session.expert([0])
    session.close()


def test_an_expert_is_asked_with_what_was_seen() -> None:
    class Strong:
        def get_action(self, seen: Any) -> Any:
            return np.array([1e3, 2.0]) * np.abs(seen)

    world = GymnasiumWorld(Pusher(), [], lambda action: action, False, expert=Strong())
    world.reset(WorkUnit("u", "pusher", 0))
    told = world.expert()
    assert told.dtype == np.float32
    assert told.tolist() == [1.0, np.float32(2 * abs(world.seen[1]))]  # of the first one its bound


class Forgetful(gymnasium.Env):
    """Its reset forgets to set back what it counts."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    made = 0

    def __init__(self) -> None:
        self.steps, self.closed = 0, False
        Forgetful.made += 1

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        assert not self.closed
        print("how forgetful")
        return np.full(1, self.steps, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        self.closed = True


gymnasium.register("Forgetful-v0", entry_point=Forgetful)


@pytest.mark.parametrize(("text", "begins", "made"), [("Forgetful-v0", 1.0, 1), ("Forgetful-v0?fresh=true", 0.0, 2)])
def test_a_fresh_environment_for_each_episode(text: str, begins: float, made: int) -> None:
    before = Forgetful.made
    served = Served(text)
    served.reset(0)
    served.step([[1]])
    assert served.reset(1).observations["state"].tolist() == [[begins]]
    assert Forgetful.made - before == made


def test_fresh_is_yes_or_no() -> None:
    with pytest.raises(Mistake, match="fresh=3: expected true or false"):
        Served("CartPole-v1?fresh=3")


def test_what_a_reset_prints_is_no_output(capsys: Any) -> None:
    Served("Forgetful-v0").reset(0)
    assert tuple(capsys.readouterr()) == ("", "how forgetful\n")


@pytest.mark.parametrize(("screen", "chosen"), [("", {"egl", "osmesa"}), (":0", {None})])
def test_mujoco_draws_without_a_screen(monkeypatch: Any, screen: str, chosen: Any) -> None:
    for name in ("MUJOCO_GL", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    if screen:
        monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.setattr(sys, "platform", "linux")
    Served("Odd-v0?render_mode=rgb_array")
    assert os.environ.get("MUJOCO_GL") in chosen
