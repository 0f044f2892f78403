"""A process of a job does not outlive its supervisor. Standard library only, syntax of Python 3.8.

Called first thing in every process of a job, whatever its interpreter. Three ways to learn of a supervisor's death,
since each has a hole: PR_SET_PDEATHSIG misses a grandchild, the pipe needs a thread that gets to run, and the
supervisor's keeper (`actors/keeper.py`), which needs nothing of the process at all, can be killed itself.
"""

import ctypes
import os
import select
import signal
import stat
import threading
from typing import Optional

SUPERVISOR = "COSMOS_ACTOR_SUPERVISOR"
"""PID:START_TIME:RANDOM of the supervisor; also the mark by which the keeper knows the processes of its job."""
INCARNATION = "COSMOS_ACTOR_INCARNATION"
"""Which life of which actor this is; also the mark by which a dead actor's leftovers are known."""
DEATH_FD = "COSMOS_ACTOR_DEATH_FD"
"""FD:INODE of a pipe whose other end only the supervisor holds. The inode keeps a process that did not inherit the pipe
from taking another file of the same number for it."""
_PR_SET_PDEATHSIG = 1


def install() -> bool:
    """From now on this process and its process group are killed when the supervisor, or this process's parent, dies.

    False, and nothing is changed, when no supervisor started it. To be called from the main thread of a fresh process.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None:
        return False
    with_parent()
    pipe = inherited_pipe()
    if pipe is not None:
        threading.Thread(target=_die_on_hang_up, args=(pipe,), name="death", daemon=True).start()
    elif not alive(supervisor):
        _die()
    return True


def with_parent() -> None:
    """This process is killed when its parent dies; it stays so in the program that it then becomes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def inherited_pipe() -> Optional[int]:
    """The read end of the death pipe, if this process inherited it."""
    number, _, inode = os.environ.get(DEATH_FD, "").partition(":")
    try:
        status = os.fstat(int(number))
    except (ValueError, OSError):
        return None
    return int(number) if stat.S_ISFIFO(status.st_mode) and str(status.st_ino) == inode else None


def describe(pid: int, random: str) -> str:
    """The value of SUPERVISOR for the living process `pid`."""
    return "{}:{}:{}".format(pid, _start_time(pid), random)


def alive(supervisor: str) -> bool:
    """Whether the process that `describe` described still runs (and is not another one with its number)."""
    pid, start_time, _ = supervisor.split(":")
    return start_time != "" and _start_time(int(pid)) == start_time


def _start_time(pid: int) -> str:
    """Clock ticks after boot, field 22 of /proc/PID/stat; empty when there is no such process or it is a zombie."""
    try:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _die_on_hang_up(pipe: int) -> None:
    poll = select.poll()
    poll.register(pipe, 0)  # hang-up is always reported; nothing is ever read
    while not poll.poll():
        pass
    _die()


def _die() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
