"""Why a process ended, as one line a person can act on. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from cosmos_actor.actors.restart_policy import Outcome

LINE_LIMIT = 300
"""Characters of an error line that are kept. Reasons travel in memberships and are printed in tables."""
STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""How shells and launchers say that they ended because of a SIGTERM."""
_ERROR_LINE = re.compile(r"^\s*(\w+(\.\w+)*(Error|Exception|Interrupt|Exit|Lost|Refused|Exceeded)\b"
                         r"|(fatal|error|panic)\b)", re.IGNORECASE)


@dataclass(frozen=True)
class ExitReason:
    """How one incarnation ended: what the policy needs (`outcome`) and what a person needs (`text`)."""

    outcome: Outcome
    text: str
    exit_code: int | None = None
    signal: str | None = None


def explain(returncode: int, *, asked: bool = False, killed_because: str | None = None, log_tail: str = "",
            out_of_memory: bool = False) -> ExitReason:
    """Name the end of a process.

    returncode: as subprocess gives it, minus the signal's number for a signal.
    asked: the supervisor had asked it to stop. killed_because: why the supervisor sent SIGKILL, if it did.
    log_tail: the end of its log. out_of_memory: the kernel's killer was at work when it died.
    """
    code, name = (returncode, None) if returncode >= 0 else (None, _signal_name(-returncode))
    outcome = Outcome.SHUTDOWN if asked else Outcome.NORMAL if returncode == 0 else Outcome.ABNORMAL
    if killed_because is not None:
        outcome = Outcome.SHUTDOWN if asked else Outcome.ABNORMAL
        return ExitReason(outcome, killed_because, code, name)
    return ExitReason(outcome, _text(code, name, asked, log_tail, out_of_memory), code, name)


def could_not_start(error: OSError) -> ExitReason:
    """The operating system did not start the command at all."""
    return ExitReason(Outcome.ABNORMAL, f"could not start: {error.strerror}: {error.filename}")


def last_error_line(log: str) -> str:
    """The last line of a log that looks like an error, else the last line that is not blank; empty for an empty log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or lines or [""])[-1][:LINE_LIMIT]


def _text(code: int | None, signal_name: str | None, asked: bool, log_tail: str, out_of_memory: bool) -> str:
    if asked and (code in (0, STOPPED_EXIT_CODE) or signal_name == "SIGTERM"):
        return "stopped"
    if code == 0:
        return "finished"
    if signal_name is not None:
        by = " (the kernel's out-of-memory killer was at work)" if out_of_memory and signal_name == "SIGKILL" else ""
        return f"killed by {signal_name}{by}"
    line = last_error_line(log_tail)
    return f"exit {code}: {line}" if line else f"exit {code} without a word in its log"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
