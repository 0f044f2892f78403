"""Whole jobs with a driver, a source and sinks of one's own: through deaths, and with sinks that misbehave."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from tests.job.test_simulators import SimRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HERE = "tests.job.plug_ins"


@pytest.fixture
def run(tmp_path, popen) -> SimRun:
    return SimRun(tmp_path, popen)


def sent(run: SimRun) -> list[dict[str, Any]]:
    """What the sink `Lines` was given, and the word of its end."""
    return read_json_lines(run.directory / "sink.jsonl")


def without_pid(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "pid"} for line in lines]


@pytest.mark.parametrize("options", [(), ("--inproc",)])
def test_a_driver_a_source_and_sinks_of_ones_own(run, options):
    run.finish(*options, sets=[
        f"sim.driver={HERE}:Twice", f"sim.source={HERE}:backwards", "run.eval_every=6", "sim.eval_trials=3",
        f'sim.sinks=["{HERE}:hanging", "{HERE}:Lines", "{HERE}:raising"]'])
    episodes = run.episodes()
    assert [line["step"] for line in run.metrics() if line["phase"] == "ppo"] == list(range(1, 13))
    trained = [episode["seed"] for episode in episodes if "phase" not in episode]
    assert max(Counter(trained).values()) == 2 and len(set(trained)) < len(trained)
    assert without_pid(sent(run)) == [*episodes, {"closed": True}]
    lost = {event["sink"].rpartition(":")[2]: event for event in run.events("sink_lost")}
    assert set(lost) == {"hanging", "raising"} and lost["raising"]["failed"] == len(episodes)
    said = run.output.read_text()
    assert said.count(f"sink {HERE}:raising: it raised ConnectionError: the tracker is down at an episode") == 1
    assert f"sink {HERE}:hanging: it was" in said and "Traceback" not in said


def test_over_deaths_one_controller_sends_each_episode_once_and_none_is_missed(run):
    process = run.start(sets=[f"sim.sinks=[\"{HERE}:Lines\"]", "run.steps=40", "run.max_staleness=2",
                              "supervisor.back_off_first_s=0.1"])
    for step, actor in ((6, "policy-0"), (14, "controller-0"), (22, "policy-0")):
        run.until_step(step)
        os.kill(run.pid(actor), signal.SIGKILL)
    run.wait(process)
    run.check_books(40)
    lives: dict[int, list[str]] = {}
    for line in sent(run):
        lives.setdefault(line["pid"], []).append(line.get("unit", "closed"))
    assert len(lives) == 2
    for units in lives.values():
        assert max(Counter(units).values()) == 1
    assert [units[-1] == "closed" for units in lives.values()] == [False, True]
    counted = [episode["unit"] for episode in run.episodes()]
    assert set(counted) <= {unit for units in lives.values() for unit in units}
    for units in lives.values():
        order = [counted.index(unit) for unit in units if unit in counted]
        assert order == sorted(order)


def test_a_stop_and_a_resume_send_each_episode_once(run):
    more = [f'sim.sinks=["{HERE}:Lines"]', "run.steps=100000", "run.checkpoint_every=100000"]
    process = run.start(sets=more)
    run.until_step(5)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    run.finish("--resume", sets=[f"run.steps={run.step + 5}"])
    lines = without_pid(sent(run))
    assert lines.count({"closed": True}) == 2
    assert [line for line in lines if line != {"closed": True}] == run.episodes()


@pytest.mark.parametrize(("setting", "words"), [
    ("sim.driver=colector", "there is no driver `colector` here; did you mean `collector`?"),
    (f"sim.source={HERE}:backward", f"{HERE} has no `backward`; did you mean `backwards`?"),
    (f"sim.sinks=[\"{HERE}:TOP\"]", f"TOP of {HERE} can not be called"),
    ("sim.driver=tests.job.nowhere:make", "there is no module tests.job.nowhere")])
def test_one_that_can_not_be_loaded_is_refused_before_anything_starts(run, setting, words):
    run.wait(run.start(sets=[setting]), code=2)
    [said] = run.output.read_text().splitlines()
    name = setting.partition("=")[0]
    assert said.startswith("error: ") and words in said and said.endswith(f"(setting `{name}`)")
    assert not run.directory.exists()


@pytest.mark.parametrize(("setting", "words"), [
    (f"sim.driver={HERE}:no_driver", "which has not all of collect, interrupt, statistics"),
    ('sim.tasks=["raech"]', "python:tests.job.reach:make has no task `raech`; it has reach")])
def test_what_only_simulators_can_tell_ends_the_job_in_one_line(run, setting, words):
    run.wait(run.start(sets=[setting]), code=2)
    said = [line for line in run.output.read_text().splitlines() if line.startswith("error:")]
    assert len(said) == 1 and words in said[0] and setting.partition("=")[0] in said[0]
