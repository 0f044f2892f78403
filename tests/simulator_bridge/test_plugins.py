from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.plugins import SimulatorName, kinds, load, parse_options

WORLDS = "python:tests.simulator_bridge.worlds:make"


def parsed(text: str) -> SimulatorName:
    return SimulatorName.parse(text)


@pytest.mark.parametrize(("text", "kind", "identity", "options"), [
    ("gymnasium:CartPole-v1", "gymnasium", "CartPole-v1", {}),
    ("gymnasium:minigrid:MiniGrid-Empty-5x5-v0", "gymnasium", "minigrid:MiniGrid-Empty-5x5-v0", {}),
    ("gymnasium:ALE/Pong-v5?frameskip=4&full=true", "gymnasium", "ALE/Pong-v5", {"frameskip": 4, "full": True}),
    ("python:a.b:make:kitchen?name=x&size=[1,2]", "python", "a.b:make:kitchen", {"name": "x", "size": [1, 2]}),
])
def test_a_name_is_taken_apart(text: str, kind: str, identity: str, options: dict[str, object]) -> None:
    assert parsed(text) == SimulatorName(kind, identity, options)


@pytest.mark.parametrize("text", ["gymnasium:A?b=1&a=x", "gymnasium:A?a=x&b=1"])
def test_one_simulator_has_one_name(text: str) -> None:
    assert str(parsed(text)) == "gymnasium:A?a=x&b=1"


@pytest.mark.parametrize("value", ["x", "3", '"3"', "true", "[1,2]", "1e3"])
def test_a_name_says_the_same_when_it_is_read_again(value: str) -> None:
    name = parsed(f"k:i?o={value}")
    assert parsed(str(name)) == name


def test_options_beside_the_name_go_before_those_in_it() -> None:
    assert SimulatorName.parse("k:i?a=1&b=2", {"b": 3}).options == {"a": 1, "b": 3}


@pytest.mark.parametrize(("text", "words"), [
    ("CartPole-v1", "expected KIND:ID, such as gymnasium:CartPole-v1"),
    (":CartPole-v1", "expected KIND:ID"),
    ("gymnasium:", "expected KIND:ID"),
    ("gymnasium:A?render_mode", "option render_mode: expected NAME=VALUE"),
    ("gymnasium:A?=1", "expected NAME=VALUE"),
])
def test_what_is_no_name_is_refused(text: str, words: str) -> None:
    with pytest.raises(Mistake) as refused:
        parsed(text)
    assert words in str(refused.value)


def test_an_option_may_hold_an_equals_sign() -> None:
    assert parse_options(["filter=a=b"]) == {"filter": "a=b"}


def test_a_callable_of_any_module_is_a_simulator() -> None:
    assert load(parsed(WORLDS)).describe().simulator == "counter"
    assert load(parsed(WORLDS + ":seven")).describe().simulator == "seven"


def test_the_current_folder_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_worlds_here.py").write_text("from tests.simulator_bridge.worlds import make\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load(parsed("python:my_worlds_here:make")).describe().simulator == "counter"


def test_an_installed_package_can_offer_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "offered-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[cosmos_actor.simulators]\ncounters = tests.simulator_bridge.worlds:make\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "counters" in kinds()
    assert load(parsed("counters:nine")).describe().simulator == "nine"


@pytest.mark.parametrize(("text", "words"), [
    ("gymnasum:CartPole-v1", "there is no kind of simulator `gymnasum` here; did you mean `gymnasium`?"),
    ("zzz:A", "there is no kind of simulator `zzz` here; there are gymnasium, libero, python"),
    ("python:nowhere.at.all:make", "there is no module nowhere in " + sys.executable),
    ("python:tests.simulator_bridge.worlds:mak", "has no attribute 'mak'"),
    ("python:tests.simulator_bridge.worlds:TOP", "TOP of tests.simulator_bridge.worlds can not be called"),
    ("python:tests.simulator_bridge.worlds", "expected python:MODULE:CALLABLE"),
    ("python:builtins:str", "gave str and no Simulator"),
    (WORLDS + "?speed=3", "can not be made: TypeError: a counter has no options, got ['speed']"),
])
def test_what_can_not_be_loaded_is_one_line(text: str, words: str) -> None:
    with pytest.raises(Mistake) as refused:
        load(parsed(text))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("source", "words"), [
    ("import numpy_of_tomorrow", "there is no module numpy_of_tomorrow"),
    ("raise OSError('libGL.so.1: cannot\\nopen')", "importing broken_world raised OSError: libGL.so.1: cannot open"),
    ("import sys; sys.exit('licence missing')", "importing broken_world raised SystemExit: licence missing"),
])
def test_an_import_that_fails_is_one_line(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_world.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Mistake) as refused:
        load(parsed("python:broken_world:make"))
    assert words in str(refused.value)
