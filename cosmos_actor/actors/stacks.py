"""The Python stacks of a process that does not answer any more, written by a signal handler in C.

It needs neither the interpreter lock nor a turn of any loop. A process that is stopped writes them when it goes on.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from cosmos_actor import death
from cosmos_actor.actors import keeper

STACKS_SIGNAL = signal.SIGUSR2


def install(path: Path | None) -> None:
    """From now on `STACKS_SIGNAL` appends all threads' stacks to `path`, or to stderr without one."""
    if path is None:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)  # open for the life of the process
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


def ask(incarnation: str) -> list[int]:
    """Ask every process of an actor's life for its stacks; the pids that were asked.

    Only those that handle the signal: it would end a grader's subprocess.
    """
    asked = []
    for pid in sorted(keeper.belonging(f"{death.INCARNATION}={incarnation}")):
        if handles(pid):
            try:
                os.kill(pid, STACKS_SIGNAL)
            except (ProcessLookupError, PermissionError):
                continue
            asked.append(pid)
    return asked


def handles(pid: int) -> bool:
    """Whether the process has a handler for `STACKS_SIGNAL`, as the kernel knows it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (STACKS_SIGNAL - 1) & 1)


def own(path: Path, title: str) -> None:
    """This process's stacks, appended to `path` under a title. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(title)
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
