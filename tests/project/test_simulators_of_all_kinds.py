"""One job, three simulators: an old Python, one behind a slow network; each is killed, stopped or cut off in turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from tests.bad_link import bad_link, skip_reason
from tests.interpreters import require_python
from tests.job.runs import START_S, Run
from tests.netns import Host
from tests.project.conftest import clean_environment
from tests.waiting import eventually, stop

pytestmark = [pytest.mark.heavy, pytest.mark.netns, pytest.mark.timeout(900),
              pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))]
KIND = "gymnasium:CartPole-v1"
STOPPED_S, CUT_S = 20.0, 60.0
ONE_WAY_S = 0.05
RECIPE = """
base = "ppo-cartpole"
[run]
steps = 100000
checkpoint_every = 100000
[data]
prompts_per_step = 6
[sim]
count = 0
fragment_steps = 32
silent_s = 3.0
[bus]
host = "{host}"
lost_after_s = 6.0
"""


class Job(Run):
    def episodes(self) -> list[dict[str, object]]:
        return read_json_lines(self.directory / "episodes.jsonl")

    def ran(self, since: int) -> set[object]:
        """Who ran the episodes from the given one on."""
        return {episode["actor"] for episode in self.episodes()[since:]}

    def until_all_ran(self, names: set[str], what: str) -> None:
        since = len(self.episodes())
        eventually(lambda: self.ran(since) >= names, what, within_s=START_S)

    def door(self) -> str:
        def look() -> str:
            lines = self.output.read_text().splitlines() if self.output.exists() else []
            told = next((line for line in lines if "simulators attach to rollout-0" in line), "")
            return told.partition("--connect ")[2].partition(" ")[0]

        return eventually(look, "where simulators attach", within_s=START_S)


def attach(host: Host, python: Path, job: Job, name: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.err").open("ab") as log:
        return host.popen([python.parent / "cosmos-actor", "attach", KIND, "--connect", job.door(), "--key",
                           job.directory / "keys" / "simulator.key", "--envs", "2", "--name", name],
                          cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, stderr=log)



def test_all_are_used_and_nothing_counts_twice_whatever_becomes_of_them(
    tmp_path: Path, make_environment: Callable[..., Path]
) -> None:
    new = make_environment(sys.executable, "constraints.txt", "gymnasium>=1")
    old = make_environment(require_python("3.8"), "constraints-py38.txt", "gymnasium")
    with bad_link() as (here, far, cable):
        cable.delay_s = ONE_WAY_S
        job = Job(tmp_path, here.popen)
        job.recipe.write_text(RECIPE.format(host=here.address))
        process = job.start()
        simulators = {"old": attach(here, old, job, "old", tmp_path), "far": attach(far, new, job, "far", tmp_path),
                      "near": attach(here, new, job, "near", tmp_path)}
        everybody = set(simulators)
        job.until_all_ran(everybody, "episodes of all three simulators")
        told = {event["simulator"]: event["python"] for event in job.events("simulator_attached")}
        assert told["old"].startswith("3.8") and not told["far"].startswith("3.8")

        simulators["near"].kill()
        job.until_all_ran({"old", "far"}, "the others going on without the killed one")
        simulators["near"] = attach(here, new, job, "near", tmp_path)
        job.until_all_ran(everybody, "the killed one's successor")

        stop(simulators["old"].pid)
        begun, before = time.monotonic(), job.step
        job.until_step(before + 3)
        print(f"\n3 steps beside a stopped simulator after {time.monotonic() - begun:.1f} s")
        time.sleep(max(0.0, STOPPED_S - (time.monotonic() - begun)))
        os.kill(simulators["old"].pid, signal.SIGCONT)
        job.until_all_ran(everybody, "the stopped one being back")

        cable.cut = {"left", "right"}
        begun, before = time.monotonic(), job.step
        job.until_step(before + 3)
        print(f"3 steps beside one that is cut off after {time.monotonic() - begun:.1f} s")
        time.sleep(max(0.0, CUT_S - (time.monotonic() - begun)))
        cable.cut = set()
        job.until_all_ran(everybody, "the one that was cut off being back")

        process.send_signal(signal.SIGTERM)
        job.wait(process)
        ends = {name: simulator.wait(30.0) for name, simulator in simulators.items()}
    logs = {name: (tmp_path / f"{name}.err").read_text() for name in simulators}
    assert ends == dict.fromkeys(simulators, 0), logs
    assert "back to rollout-0" in logs["far"] or logs["far"].count("attached to rollout-0") == 2
    episodes = job.episodes()
    assert max(Counter(episode["unit"] for episode in episodes).values()) == 1
    assert max(Counter((episode["task"], episode["seed"], episode["attempt"]) for episode in episodes).values()) == 1
    balance = job.balance()
    assert balance["balanced"] and balance["in_flight"] == 0
    assert [line["step"] for line in job.metrics()] == list(range(1, job.step + 1))
    kinds = Counter(event["kind"] for event in job.events("simulator_failed"))
    print(f"{len(episodes)} episodes once each, {job.step} steps, failures {dict(kinds)}")
    assert set(kinds) <= {"lost", "hang"} and sum(kinds.values()) >= 2
