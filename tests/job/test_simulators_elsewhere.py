"""Whole jobs whose simulators the supervisor starts through a launcher: into a network namespace, by a remote shell.

None shares a file system's key, a variable or a process group with the job: what it needs goes by standard input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest

from tests.job import sshd
from tests.job.runs import START_S
from tests.job.test_simulators import SimRun
from tests.netns import Host, skip_reason, two_hosts
from tests.project.source import ROOT
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMISED_S = 8.0
"""What is behind a launcher that is killed has so long to go: it leaves by itself at once, or is killed after 6 s."""
ENDLESS = ("run.steps=100000", "run.checkpoint_every=100000")
Popen = Callable[..., "subprocess.Popen[Any]"]


class Node(NamedTuple):
    """A way to start simulators elsewhere, and the address of the job's host there."""

    through: tuple[str, ...]
    host: str = "127.0.0.1"
    wrap: Callable[[list[str]], list[str]] = list
    """How `up` itself is started."""

    def sets(self, *more: str) -> list[str]:
        words = ", ".join(f'"{word}"' for word in self.through)
        return [f"sim.through=[{words}]", f'bus.host="{self.host}"', *more]


def in_a_namespace(folder: Any, popen: Popen) -> Iterator[Node]:
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    with two_hosts() as (head, other):
        assert isinstance(other, Host)
        yield Node(tuple(other.command([])), head.address, head.command)


def by_a_remote_shell(folder: Any, popen: Popen) -> Iterator[Node]:
    program, path = str(ROOT / "tests" / "job" / "remote_shell.py"), str(folder / "node")
    popen([sys.executable, program, "serve", path])
    eventually(lambda: os.path.exists(path), "the node")
    yield Node((sys.executable, program, "run", path))


def by_ssh(folder: Any, popen: Popen) -> Iterator[Node]:
    reason = sshd.skip_reason()
    if reason:
        pytest.skip(reason)
    yield Node(("ssh", "-F", str(sshd.start(folder, popen)), "node7"))


@pytest.fixture(scope="module", params=[
    pytest.param(in_a_namespace, marks=pytest.mark.netns), by_a_remote_shell, by_ssh])
def node(request: Any, tmp_path_factory: Any, module_popen: Popen) -> Iterator[Node]:
    yield from request.param(tmp_path_factory.mktemp("node"), module_popen)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: Any, module_popen: Popen) -> Iterator[Node]:
    """One way is enough for what happens behind the launcher."""
    yield from by_a_remote_shell(tmp_path_factory.mktemp("node"), module_popen)


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: Any, module_popen: Popen) -> SimRun:
    made = SimRun(tmp_path_factory.mktemp("at-home"), module_popen)
    made.finish()
    return made


@pytest.fixture
def run(tmp_path: Any, popen: Popen) -> SimRun:
    return SimRun(tmp_path, popen)


def behind(run: SimRun) -> list[psutil.Process]:
    """The processes that serve simulators of this run, and the far ends above them, wherever they are."""
    lines = run.output.read_text().splitlines()
    door = next((line.partition("--connect ")[2].split()[0] for line in lines if "--connect tcp://" in line), "none")
    serving = [process for process in psutil.process_iter(["cmdline"])
               if {"attach", door} <= set(process.info["cmdline"] or ())]
    return [*serving, *(parent for process in serving if (parent := process.parent()) and far(parent))]


def far(process: psutil.Process) -> bool:
    return "cosmos_actor.simulator_bridge.far_end" in process.cmdline()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def standing(run: SimRun, count: int) -> list[psutil.Process]:
    """The processes behind the launchers, when `count` simulators have attached and the job steps."""
    eventually(lambda: len(run.events("simulator_attached")) >= count, f"{count} simulators", within_s=START_S)
    run.until_step(2)
    found = behind(run)
    assert len(found) == 2 * count
    return found


def test_the_losses_are_those_of_a_simulator_at_home(run: SimRun, node: Node, at_home: SimRun) -> None:
    run.wait(run.start(sets=node.sets(), through=node.wrap))
    run.check_books()
    assert run.losses() == at_home.losses()
    assert behind(run) == []
    [started] = [event for event in run.events("started") if event["actor"] == "simulator-0"]
    [attached] = run.events("simulator_attached")
    assert started["interpreter"] == node.through[0] and attached["python"] == sys.version.split()[0]


def test_options_of_any_characters_arrive(run: SimRun, node: Node) -> None:
    run.wait(run.start(sets=node.sets("run.steps=1", 'sim.options.text="a b; $HOME * (c) \'d\'"'), through=node.wrap))
    [attached] = run.events("simulator_attached")
    assert attached["kind"] == "python:tests.job.reach:make?text=a b; $HOME * (c) 'd'"


def test_a_launcher_that_is_killed_is_started_again_and_nothing_is_left_behind_it(run: SimRun, node: Node) -> None:
    process = run.start(sets=node.sets(*ENDLESS, "sim.count=2", "sim.envs=2"), through=node.wrap)
    before = standing(run, 2)
    os.kill(run.pid("simulator-0"), signal.SIGKILL)
    eventually(lambda: len(alive(before)) <= 2, "the end of what was behind it", within_s=PROMISED_S)
    eventually(lambda: len(run.events("simulator_attached")) >= 3, "the next one", within_s=START_S)
    run.until_step(run.step + 2)
    assert len(behind(run)) == 4
    process.send_signal(signal.SIGTERM)
    run.wait(process)
    assert behind(run) == []  # a stop waits for what is behind a launcher
    assert [event["actor"] for event in run.events("restarting")] == ["simulator-0"]
    assert {event["reason"] for event in run.events("exited") if event["outcome"] == "shutdown"} == {"stopped"}


def test_a_supervisor_that_is_killed_leaves_nothing_elsewhere(run: SimRun, node: Node) -> None:
    process = run.start(sets=node.sets(*ENDLESS), through=node.wrap)
    before = standing(run, 1)
    process.kill()
    eventually(lambda: not alive(before), "the end of what was behind the launcher", within_s=PROMISED_S)
    eventually(lambda: not run.processes(), "the end of every process of the job", within_s=5.0)


def test_a_simulator_that_is_stopped_for_good_goes_with_its_launcher(run: SimRun, shell: Node) -> None:
    process = run.start(sets=shell.sets(*ENDLESS), through=shell.wrap)
    before = standing(run, 1)
    next(one for one in before if not far(one)).suspend()
    process.kill()
    eventually(lambda: not alive(before), "the end of what was behind the launcher", within_s=PROMISED_S)


def test_a_simulator_that_dies_there_is_started_again(run: SimRun, shell: Node) -> None:
    process = run.start(sets=shell.sets(*ENDLESS), through=shell.wrap)
    before = standing(run, 1)
    next(one for one in before if not far(one)).kill()
    eventually(lambda: len(run.events("simulator_attached")) >= 2, "the next one", within_s=START_S)
    [exited] = [event for event in run.events("exited") if event["actor"] == "simulator-0"]
    assert (exited["exit_code"], exited["outcome"]) == (128 + 9, "abnormal")
    assert "killed by signal 9" in exited["reason"] and not alive(before)
    process.send_signal(signal.SIGTERM)
    run.wait(process)
