"""What a launcher starts on a node: it runs what it hears, and ends with its lifeline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List

import pytest

from cosmos_actor import death
from cosmos_actor.simulator_bridge import orphans
from cosmos_actor.simulator_bridge.far_end import LEAVE_S, Letter, command
from cosmos_actor.simulator_bridge.mistakes import Mistake
from tests.waiting import eventually, stop

ROOT = Path(__file__).parents[2]
FAR_END = [sys.executable, "-m", "cosmos_actor.simulator_bridge.far_end"]
FRIEND = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
POLITE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); " + FRIEND
LEAVES_ONE = "import subprocess; subprocess.Popen(['setsid', 'sleep', '600']); " + FRIEND
QUICK = """
import sys
from cosmos_actor.simulator_bridge import far_end
far_end.LETTER_S = 0.2
sys.exit(far_end.main())
"""


def start(popen: Any, code: str, *words: str, text: str = "", **env: str) -> subprocess.Popen[bytes]:
    """A far end that has its letter, and whose lifeline is held."""
    process = popen(FAR_END, cwd=str(ROOT), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(Letter(["-c", code, *words], env, text).line())
    process.stdin.flush()
    return process


def told(process: subprocess.Popen[bytes]) -> int:
    """The process number that the child has printed."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def runs(pid: int) -> bool:
    try:
        return Path("/proc/{}/stat".format(pid)).read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def two(pid: int) -> List[int]:
    """Its descendants, when they are two."""
    found = orphans.descendants(pid)
    return found if len(found) == 2 else []


def test_words_variables_and_input_arrive_whatever_is_in_them(popen: Any) -> None:
    nasty = "a b'c\"d $HOME `id` * ? & ; | ( ) \\ \n é"
    code = "import os, sys; sys.stdout.buffer.write('|'.join([sys.argv[1], os.environ['NASTY'], input()]).encode())"
    process = start(popen, code, nasty, text="a key\n", NASTY=nasty)
    assert process.wait(20) == 0
    assert process.stdout is not None and process.stdout.read().decode() == "|".join([nasty, nasty, "a key"])


@pytest.mark.parametrize(("code", "ends", "said"), [
    ("", 0, b""), ("raise SystemExit(3)", 3, b""),
    ("import os; os.kill(os.getpid(), 9)", 128 + 9, b"killed by signal 9 (Killed)\n")])
def test_its_exit_code_is_that_of_what_it_runs(popen: Any, code: str, ends: int, said: bytes) -> None:
    process = start(popen, code)
    assert process.wait(20) == ends
    assert process.stderr is not None and process.stderr.read() == said


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_asks_its_child_to_leave_at_the_end_of_its_input_and_when_it_is_asked_to(popen: Any, number: Any) -> None:
    process = start(popen, POLITE)
    child = told(process)
    assert process.stdin is not None
    process.stdin.close() if number is None else process.send_signal(number)
    assert process.wait(LEAVE_S) == 7
    assert not runs(child)


def test_one_that_is_stopped_is_killed_with_all_that_it_has_started(popen: Any) -> None:
    process = start(popen, LEAVES_ONE)
    child = told(process)
    everybody = eventually(lambda: two(process.pid), "the one that it leaves")
    stop(child)
    begun = time.monotonic()
    process.stdin.close()  # type: ignore[union-attr]
    assert process.wait(LEAVE_S + 5.0) == 128 + 9
    assert time.monotonic() - begun > LEAVE_S - 1.0
    eventually(lambda: not any(map(runs, everybody)), "the end of all that it has started", within_s=2.0)


def test_what_is_left_by_one_that_is_killed_goes_too(popen: Any) -> None:
    process = start(popen, LEAVES_ONE)
    child = told(process)
    everybody = eventually(lambda: two(process.pid), "the one that it leaves")
    os.kill(child, signal.SIGKILL)
    assert process.wait(20) == 128 + 9
    eventually(lambda: not any(map(runs, everybody)), "the end of all that it has started", within_s=2.0)


def test_its_child_does_not_outlive_it(popen: Any) -> None:
    process = start(popen, FRIEND)
    child = told(process)
    process.kill()
    process.wait(5)
    eventually(lambda: not runs(child), "the end of its child", within_s=5.0)


def test_the_marks_of_a_supervisor_elsewhere_do_not_reach_its_child(popen: Any, monkeypatch: Any) -> None:
    """srun carries all variables: by these the simulator would take its supervisor for dead, and die."""
    monkeypatch.setenv(death.SUPERVISOR, "1:999999999999:elsewhere")
    monkeypatch.setenv(death.DEATH_FD, "3:1")
    process = start(popen, "from cosmos_actor import death; raise SystemExit(death.install())")
    assert process.wait(20) == 0


@pytest.mark.parametrize(("given", "said"), [
    (b"", "which is at its end"), (b"{", "which is at its end"), (b"{}\n", "for another version of cosmos-actor"),
    (b"hello\n", "for another version of cosmos-actor, or not for it"), (bytes(2 << 20), "more than 1048576 bytes")],
    ids=["nothing", "a part", "another version", "another text", "a flood"])
def test_what_is_no_letter_is_told_in_one_line(popen: Any, given: bytes, said: str) -> None:
    done = subprocess.run(FAR_END, cwd=str(ROOT), input=given, capture_output=True, timeout=20)
    (line,) = done.stderr.decode().splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and said in line


def test_a_launcher_that_carries_nothing_leaves_no_process_behind(popen: Any) -> None:
    process = popen([sys.executable, "-c", QUICK], cwd=str(ROOT), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.wait(20) == 2
    assert b"did not come on standard input within 0.2 s" in process.stderr.read()


def test_the_command_line_is_free_of_what_a_shell_would_change() -> None:
    assert command(["ssh", "node7"], "/opt/sim/bin/python3.8") == (
        "ssh", "node7", "/opt/sim/bin/python3.8", "-m", "cosmos_actor.simulator_bridge.far_end")
    for python in ("/a b/python", "~/python", "$HOME/python", "python;id", "", "pythön"):
        with pytest.raises(Mistake, match="which no shell changes"):
            command(["ssh", "node7"], python)
