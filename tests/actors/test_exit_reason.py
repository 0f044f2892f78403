from __future__ import annotations

import pytest

from cosmos_actor.actors.exit_reason import could_not_start, explain, last_error_line
from cosmos_actor.actors.restart_policy import Outcome

TRACEBACK = """starting
Traceback (most recent call last):
  File "role.py", line 3, in <module>
    raise ValueError("no model in /models/x")
ValueError: no model in /models/x
/usr/lib/python3/resource_tracker.py:254: UserWarning: 3 leaked objects
"""


@pytest.mark.parametrize("returncode, options, outcome, text", [
    (0, {}, Outcome.NORMAL, "finished"),
    (0, {"asked": True}, Outcome.SHUTDOWN, "stopped"),
    (-15, {"asked": True}, Outcome.SHUTDOWN, "stopped"),
    (143, {"asked": True}, Outcome.SHUTDOWN, "stopped"),
    (-15, {}, Outcome.ABNORMAL, "killed by SIGTERM"),
    (-9, {}, Outcome.ABNORMAL, "killed by SIGKILL"),
    (-9, {"out_of_memory": True}, Outcome.ABNORMAL,
     "killed by SIGKILL (the kernel's out-of-memory killer was at work)"),
    (-11, {"out_of_memory": True}, Outcome.ABNORMAL, "killed by SIGSEGV"),
    (-9, {"killed_because": "stuck: no heartbeat for 12.0 s"}, Outcome.ABNORMAL, "stuck: no heartbeat for 12.0 s"),
    (-9, {"killed_because": "did not stop within 5 s", "asked": True}, Outcome.SHUTDOWN, "did not stop within 5 s"),
    (1, {"log_tail": TRACEBACK}, Outcome.ABNORMAL, "exit 1: ValueError: no model in /models/x"),
    (3, {"asked": True, "log_tail": "error: disk full\n"}, Outcome.SHUTDOWN, "exit 3: error: disk full"),
    (2, {}, Outcome.ABNORMAL, "exit 2 without a word in its log"),
    (-34, {}, Outcome.ABNORMAL, "killed by SIGRTMIN"),
    (-40, {}, Outcome.ABNORMAL, "killed by signal 40"),
])
def test_every_end_has_a_name(returncode: int, options: dict, outcome: Outcome, text: str) -> None:
    reason = explain(returncode, **options)
    assert (reason.outcome, reason.text) == (outcome, text)
    assert reason.exit_code == (returncode if returncode >= 0 else None)
    assert (reason.signal is None) == (returncode >= 0)


@pytest.mark.parametrize("log, line", [
    ("", ""),
    ("\n \n", ""),
    ("loading\ndone\n", "done"),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory\nbye\n", "torch.cuda.OutOfMemoryError: CUDA out of memory"),
    ("error: rank 1 of 2 was killed by SIGKILL\nW1129 some warning\n", "error: rank 1 of 2 was killed by SIGKILL"),
    ("Fatal Python error: Segmentation fault\n\nThread 0x1:\n", "Fatal Python error: Segmentation fault"),
    ("errors so far: none\nlast words\n", "last words"),
])
def test_the_error_is_found_under_later_lines(log: str, line: str) -> None:
    assert last_error_line(log) == line


def test_an_error_line_is_bounded() -> None:
    assert len(last_error_line("ValueError: " + "x" * 10_000)) == 300


def test_a_command_that_the_system_refuses() -> None:
    reason = could_not_start(FileNotFoundError(2, "No such file or directory", "/no/python"))
    assert reason.text == "could not start: No such file or directory: /no/python"
    assert reason.outcome is Outcome.ABNORMAL
