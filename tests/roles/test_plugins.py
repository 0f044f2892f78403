"""Sources, drivers and sinks are found by name; what can not be is one line that names the setting."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.errors import BadValue, NotFound, UnknownName, UserError
from cosmos_actor.roles.collector import Collector
from cosmos_actor.roles.driver import Driver
from cosmos_actor.roles.plugins import DRIVERS, REGISTRIES, SINKS, SOURCES, Registry, main
from cosmos_actor.roles.unit_source import in_turn, make_source
from tests.job import plug_ins
from tests.roles.test_control_rollout import settings_of
from tests.roles.yard import DESCRIPTION, Yard

HERE = "tests.job.plug_ins"


def test_what_is_built_in_is_there() -> None:
    assert (SOURCES.load("in_turn"), DRIVERS.load("collector")) == (in_turn, Collector)
    assert sorted(REGISTRIES) == ["sim.driver", "sim.sinks", "sim.source"]
    for registry in REGISTRIES.values():
        for name in registry.built_in:
            assert callable(registry.load(name))


def test_a_path_names_whatever_can_be_imported_and_called() -> None:
    assert SOURCES.load(f"{HERE}:backwards") is plug_ins.backwards
    assert DRIVERS.load(f"{HERE}:Namespace.twice") is plug_ins.Namespace.twice


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that has plug-ins."""
    information = tmp_path / "offered-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[cosmos_actor.sources]\nback-wards = {HERE}:backwards\nin_turn = {HERE}:backwards\n"
        f"[cosmos_actor.drivers]\ntwice = {HERE}:Namespace.twice [extra]\n[cosmos_actor.sinks]\nlines = {HERE}:Lines\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_installed_package_can_offer_each_of_them_and_replaces_nothing_built_in(offered: None) -> None:
    assert SOURCES.load("back-wards") is plug_ins.backwards
    assert DRIVERS.load("twice") is plug_ins.Namespace.twice
    assert SINKS.load("lines") is plug_ins.Lines
    assert SOURCES.load("in_turn") is in_turn
    with pytest.raises(UnknownName, match="there is no sink `line` here; did you mean `lines`?"):
        SINKS.load("line")


def test_the_current_folder_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_source_here.py").write_text(f"from {HERE} import backwards\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert SOURCES.load("my_source_here:backwards") is plug_ins.backwards


@pytest.mark.parametrize(("registry", "name", "kind", "words"), [
    (SOURCES, "in_trun", UnknownName, "there is no source `in_trun` here; did you mean `in_turn`?"),
    (DRIVERS, "zzz", UnknownName, "there is no driver `zzz` here; there are collector, or package.module:name"),
    (SINKS, "zzz", UnknownName, "there is no sink `zzz` here; there are none, or package.module:name"),
    (SOURCES, "nowhere.at.all:make", NotFound, f"nowhere.at.all:make: there is no module nowhere in {sys.executable}"),
    (SOURCES, f"{HERE}:backward", NotFound, f"{HERE} has no `backward`; did you mean `backwards`?"),
    (DRIVERS, f"{HERE}:Namespace.zzz", NotFound, f"{HERE} has no `Namespace.zzz`"),
    (SINKS, f"{HERE}:TOP", BadValue, f"TOP of {HERE} can not be called, it is 7"),
])
def test_what_can_not_be_loaded_is_one_line(registry: Registry, name: str, kind: type, words: str) -> None:
    with pytest.raises(kind) as refused:
        registry.load(name)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).endswith(f"(setting `{registry.setting}`)")


@pytest.mark.parametrize(("source", "words"), [
    ("import numpy_of_tomorrow", "there is no module numpy_of_tomorrow"),
    ("raise OSError('no\\nlicence')", "importing broken_plug_in raised OSError: no licence"),
    ("import sys; sys.exit('no licence')", "importing broken_plug_in raised SystemExit: no licence"),
])
def test_an_import_that_fails_is_one_line(
        source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plug_in.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotFound, match=words):
        SINKS.load("broken_plug_in:make")


def test_another_interpreter_says_what_it_can_not_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim.source=in_turn", f"sim.sinks={HERE}:Lines"]) == 0
    assert main(["sim.driver=colector", f"sim.sinks={HERE}:Lines", f"sim.sinks={HERE}:TOP"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in said] == [True, True]
    assert "did you mean `collector`" in said[0] and "can not be called" in said[1]


def unmakeable(tasks: Any, seed: int) -> Any:
    raise KeyError("curriculum")


@pytest.mark.parametrize(("make", "tasks", "line"), [
    (unmakeable, (), "the source mine raised KeyError: 'curriculum' (setting `sim.source`)"),
    (lambda tasks, seed: 3, (), "the source mine gave int, not a function of a number"),
    (in_turn, ("cuont",), "test:count has no task `cuont`; it has count (setting `sim.tasks`)")])
def test_a_source_that_gives_no_units_is_one_line(make: Any, tasks: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError) as refused:
        make_source(make, settings_of(source="mine", tasks=tasks), DESCRIPTION)
    assert line in str(refused.value)


def test_the_built_in_driver_is_one() -> None:
    assert isinstance(object.__new__(Collector), Driver) and not isinstance(Yard(), Driver)
