"""Nothing of a job outlives its supervisor, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor import death
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.keeper import belonging, memory_prefix
from tests.interpreters import find_python
from tests.leaks import MARK
from tests.waiting import eventually, stop

ROOT = Path(__file__).parents[2]
PROMISED_S = 5.0
Popen = Callable[..., "subprocess.Popen[Any]"]


def start_job(popen: Popen, folder: Path, *kinds: str) -> tuple[subprocess.Popen[str], int]:
    """A job that stands, and the pid of its keeper."""
    job = popen([sys.executable, "-m", "tests.actors.programs.supervisor_program", str(folder),
                 find_python("3.8") or sys.executable, *kinds], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert job.stdout is not None
    word, pid = job.stdout.readline().split()
    assert word == "keeper"
    return job, int(pid)


def all_gone() -> bool:
    return not belonging(MARK)


def names(prefix: str) -> list[str]:
    """Of shared memory and semaphores."""
    return [name for name in os.listdir("/dev/shm") if prefix in name]


def test_kill_9_of_the_supervisor_leaves_no_process(popen: Popen, tmp_path: Path) -> None:
    job, keeper = start_job(popen, tmp_path, "sleeper", "stubborn", "leave", "deep", "bare", "old")
    assert len(belonging(MARK)) == 1 + 1 + 6 + 2 + 1, "supervisor, keeper, children, leave's two, deep's one"
    job.kill()
    job.wait(PROMISED_S)
    assert eventually(all_gone, "the end of every process", within_s=PROMISED_S)
    events = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert events[-1]["event"] == "supervisor_died" and events[-1]["killed_pids"]


def test_kill_9_of_supervisor_and_keeper_at_once_leaves_none_that_knows_of_death(popen: Popen, tmp_path: Path) -> None:
    job, keeper = start_job(popen, tmp_path, "sleeper", "stubborn", "deep", "old")
    stop(job.pid)
    os.kill(keeper, signal.SIGKILL)
    job.kill()
    job.wait(PROMISED_S)
    assert eventually(all_gone, "the end of every process", within_s=PROMISED_S)


def test_a_replaced_keeper_knows_the_children_that_were_there_before_it(popen: Popen, tmp_path: Path) -> None:
    job, keeper = start_job(popen, tmp_path, "bare")
    os.kill(keeper, signal.SIGKILL)
    events = tmp_path / "run" / "events.jsonl"
    assert eventually(lambda: [event for event in read_json_lines(events) if event["event"] == "keeper_replaced"],
                      "the replacement of the keeper")
    job.kill()
    job.wait(PROMISED_S)
    assert eventually(all_gone, "the end of every process", within_s=PROMISED_S)


def test_shared_memory_that_a_child_had_made_goes_with_the_supervisor(popen: Popen, tmp_path: Path) -> None:
    job, keeper = start_job(popen, tmp_path, "memory")
    prefix = memory_prefix(death.describe(job.pid, "")).rstrip("-")
    assert len(names(prefix)) == 2
    job.kill()
    job.wait(PROMISED_S)
    assert eventually(lambda: not names(prefix), "the end of the names in /dev/shm", within_s=PROMISED_S)
    assert eventually(all_gone, "the end of every process", within_s=PROMISED_S)


def test_a_stopped_process_goes_too(popen: Popen, tmp_path: Path) -> None:
    job, keeper = start_job(popen, tmp_path, "sleeper", "bare")
    for pid in belonging(MARK) - {job.pid, keeper}:
        stop(pid)
    job.kill()
    job.wait(PROMISED_S)
    assert eventually(all_gone, "the end of every process", within_s=PROMISED_S)


def test_an_interrupt_of_the_terminal_reaches_only_the_supervisor(popen: Popen, tmp_path: Path) -> None:
    """Ctrl-C goes to the foreground process group; children and keeper stop in order because they are not in it."""
    job, keeper = start_job(popen, tmp_path, "sleeper")
    assert {os.getpgid(pid) for pid in belonging(MARK)} >= {job.pid, keeper}
    os.killpg(job.pid, signal.SIGINT)
    job.wait(10)
    assert eventually(all_gone, "the end of every process", within_s=PROMISED_S)
    events = read_json_lines(tmp_path / "run" / "events.jsonl")
    assert [event["reason"] for event in events if event["event"] == "exited"] == ["stopped"]
    assert events[-1]["event"] == "ended", "the keeper had nothing to do"


# ---- install


def test_install_does_nothing_without_a_supervisor(popen: Popen) -> None:
    code = "from cosmos_actor import death; print(death.install())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "False\n"


def test_a_rank_dies_with_its_launcher_though_its_supervisor_lives(popen: Popen) -> None:
    """A launcher closes the death pipe in its ranks and gives them sessions of their own."""
    rank = ("from cosmos_actor import death; import os, time; "
            "print(os.getpid(), death.install(), flush=True); time.sleep(600)")
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)"
    environment = {**os.environ, death.SUPERVISOR: death.describe(os.getpid(), "x")}
    process = popen([sys.executable, "-c", launcher], env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    pid, installed = process.stdout.readline().split()
    assert installed == "True" and death.alive(death.describe(int(pid), "x"))
    process.kill()
    assert eventually(all_gone, "the end of the rank", within_s=PROMISED_S)


def test_a_process_that_starts_after_its_supervisor_died_ends_at_once() -> None:
    code = "from cosmos_actor import death; death.install(); print('went on')"
    environment = {**os.environ, death.SUPERVISOR: f"{os.getpid()}:another start time:x"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, start_new_session=True,
                          capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_descriptor_that_only_has_the_pipe_s_number_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    other_read, other_write = os.pipe()
    try:
        monkeypatch.setenv(death.DEATH_FD, f"{read}:{os.fstat(read).st_ino}")
        assert death.inherited_pipe() == read
        monkeypatch.setenv(death.DEATH_FD, f"{other_read}:{os.fstat(read).st_ino}")
        assert death.inherited_pipe() is None
        monkeypatch.setenv(death.DEATH_FD, "")
        assert death.inherited_pipe() is None
    finally:
        for fd in (read, write, other_read, other_write):
            os.close(fd)


def test_a_reused_process_number_is_not_taken_for_the_supervisor() -> None:
    living = death.describe(os.getpid(), "x")
    assert death.alive(living)
    pid, start_time, random = living.split(":")
    assert not death.alive(f"{pid}:{int(start_time) - 1}:{random}")
    ended = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    described = death.describe(ended.pid, "x")
    assert death.alive(described) and ended.stdin is not None
    ended.stdin.close()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not death.alive(described), "a zombie does not live"
    ended.wait()
    assert not death.alive(described)
    assert not death.alive(death.describe(ended.pid, "x")), "what was dead when it was described never lived"
