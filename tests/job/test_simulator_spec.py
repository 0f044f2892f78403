"""How the supervisor starts a simulator: the command here, and what goes to another node instead of a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor import death
from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.errors import BadValue
from cosmos_actor.job.simulator_spec import simulator_spec
from cosmos_actor.recipes.plan import plan
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.simulator_bridge.far_end import Letter

DOOR = "tcp://10.0.0.7:5600"
FAR_END = ("-m", "cosmos_actor.simulator_bridge.far_end")
NODES = ['sim.through=["ssh", "-oBatchMode=yes", "{node}"]', 'sim.nodes=["node7", "node8"]',
         "sim.python=/opt/sim/bin/python"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "simulator.key"
    path.write_text("the secret")
    return path


def specs(key: Path, *sets: str) -> list[ChildSpec]:
    settings = resolve("ppo-cartpole", sets)
    placed = [one for one in plan(settings, devices=("0",)).actors if one.role == "simulator"]
    return [simulator_spec(settings, one, DOOR, key) for one in placed]


def letter(spec: ChildSpec) -> Letter:
    assert spec.stdin is not None
    return Letter.parse(spec.stdin("1-abc"))


def test_on_this_host_it_is_a_command_with_the_keys_path(key: Path) -> None:
    [spec] = specs(key, "sim.env.A=b c")
    assert spec.command == (
        sys.executable, "-m", "cosmos_actor.cli", "attach", "gymnasium:CartPole-v1", "--connect", DOOR, "--key",
        str(key), "--envs", "4", "--name", "simulator-0")
    assert dict(spec.env) == {"OMP_NUM_THREADS": "1", "A": "b c"} and spec.stdin is None


def test_through_a_launcher_the_command_line_says_nothing_of_it(key: Path) -> None:
    one, two, three = specs(key, *NODES, "sim.count=3", "sim.env.A=b c", 'sim.options.text="(x) $y"')
    for spec, node in ((one, "node7"), (two, "node8"), (three, "node7")):
        assert spec.command == ("ssh", "-oBatchMode=yes", node, "/opt/sim/bin/python", *FAR_END)
        assert dict(spec.env) == {}  # nor the launcher of what is meant for the node
    told = letter(two)
    assert told.words == ["-m", "cosmos_actor.cli", "attach", "gymnasium:CartPole-v1", "--connect", DOOR, "--key", "-",
                          "--envs", "4", "--name", "simulator-1", "--option", "text=(x) $y"]
    assert told.env == {"OMP_NUM_THREADS": "1", "A": "b c", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
                        "SPT_NOENV": "1", death.INCARNATION: "1-abc"}
    assert told.text == "the secret"


def test_a_launcher_may_lead_to_one_place_only(key: Path) -> None:
    one, two = specs(key, 'sim.through=["ip", "netns", "exec", "lab"]', "sim.count=2")
    assert one.command == two.command == ("ip", "netns", "exec", "lab", sys.executable, *FAR_END)


@pytest.mark.parametrize("sets", [NODES[:1], NODES[1:2], ['sim.through=["nice"]', NODES[1]]])
def test_nodes_without_a_place_for_them_are_refused(sets: list[str]) -> None:
    with pytest.raises(BadValue, match=r"sim.nodes and \{node\} in sim.through need each other"):
        resolve("ppo-cartpole", sets)


def test_a_list_of_texts_can_be_given_on_the_command_line() -> None:
    settings: Any = resolve("ppo-cartpole", [*NODES, 'sim.tasks=["a", "b"]'])
    assert settings.sim.nodes == ("node7", "node8") and settings.sim.tasks == ("a", "b")
