"""Stacks on a signal: of processes that handle it, and of no other."""

from __future__ import annotations

import os
import subprocess
import sys

from cosmos_actor import death
from cosmos_actor.actors import stacks
from cosmos_actor.actors.processes import process_state
from tests.waiting import eventually, stop

INCARNATION = f"1-{os.getpid()}-stacks"
HOLDS = """
import ctypes, pathlib, sys
from cosmos_actor.actors import stacks
stacks.install(pathlib.Path(sys.argv[1]))
def hold_the_lock():
    print("here", flush=True)
    while True:  # a signal ends a usleep early
        ctypes.PyDLL(None).usleep(60_000_000)
hold_the_lock()
"""


def start(popen, *command: str) -> subprocess.Popen[bytes]:
    return popen([*command], stdout=subprocess.PIPE, env={**os.environ, death.INCARNATION: INCARNATION})


def test_a_process_that_holds_its_interpreter_lock_writes_its_stacks(popen, tmp_path):
    file = tmp_path / "logs" / "1.stacks.txt"
    process = start(popen, sys.executable, "-c", HOLDS, str(file))
    assert process.stdout.readline() == b"here\n"
    other = start(popen, "sleep", "60")
    eventually(lambda: os.path.basename(os.readlink(f"/proc/{other.pid}/exe")) != os.path.basename(sys.executable),
               "the start of sleep")
    assert stacks.ask(INCARNATION) == [process.pid], "a process without a handler would be ended by the signal"
    eventually(lambda: "in hold_the_lock" in file.read_text(), "the stacks")
    assert other.poll() is None and process.poll() is None


def test_nobody_is_asked_for_a_life_that_is_over():
    assert stacks.ask("1-nobody-has-this") == []


def test_the_kernel_says_how_a_process_is(popen):
    process = start(popen, "sleep", "60")
    eventually(lambda: process_state(process.pid) == "asleep", "sleeping")
    stop(process.pid)
    eventually(lambda: process_state(process.pid).startswith("stopped by a signal"), "the stop")
    process.kill()
    process.wait()
    assert process_state(process.pid) == "gone"
