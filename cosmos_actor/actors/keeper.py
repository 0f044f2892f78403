"""Finding and ending every process that belongs to a job, also those that left their process group and session.

Run as a script it is the supervisor's last will: `keeper.py MARK EVENTS_FILE`, standard input a pipe whose other end
only the supervisor holds. The supervisor writes `+PID` for each leader it starts, `-PID` when that is gone, and
`done` after an orderly stop. If the pipe closes without `done`, the supervisor was killed, and every process of its
job is killed within a second; what they had in /dev/shm under the job's prefix, or torch's, goes after them.

A process belongs to a job if its environment at its start carried the mark, if it is in a leader's session, or if it
descends from one that does. Standard library only; the script imports nothing of this package, so that it starts in
milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection

SHARED_MEMORY = "/dev/shm"
SEMAPHORE = "sem."
"""What the C library puts before a semaphore's name there."""
SETTLE_S = 0.02
"""Between two looks. A killed process needs a moment to go, and its last fork shows up only then."""
KILL_LIMIT_S = 4.5
"""When to give up. The promise is 5 s, and a process in an uninterruptible wait can not be helped."""


def belonging(mark: str, leaders: Collection[int] = ()) -> set[int]:
    """The living processes that belong to the job or incarnation of `mark` (NAME=VALUE), without this one."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for pid in _pids():
        status = _status(pid)
        if status is None:
            continue
        parents[pid], session = status
        if session in leaders or pid in leaders or _is_marked(pid, mark.encode()):
            found.add(pid)
    return _with_descendants(found, parents) - {os.getpid()}


def kill_all(mark: str, leaders: Collection[int] = (), limit_s: float = KILL_LIMIT_S) -> set[int]:
    """SIGKILL to all that belong, until two looks found none or `limit_s` is over. Which ones there were.

    Two, because the kernel shows no environment of a process for a moment while that executes a new program.
    """
    until, killed, empty_looks = time.monotonic() + limit_s, set[int](), 0
    while time.monotonic() < until:
        pids = belonging(mark, leaders)
        for pid in pids:
            _kill(pid)
        killed |= pids
        empty_looks = 0 if pids else empty_looks + 1
        if empty_looks == 2:
            break
        time.sleep(SETTLE_S)
    return killed


def memory_prefix(supervisor: str, incarnation: str = "") -> str:
    """How the names of one life's files in /dev/shm begin, or without `incarnation` those of a whole job.

    Whoever ends that life removes them. No colon is in it: multiprocessing's resource tracker can not take one.
    """
    return "-".join(["cosmos", supervisor.replace(":", "-"), *([incarnation] if incarnation else []), ""])


def torch_prefixes(pids: Collection[int]) -> list[str]:
    """How the names begin that torch gives the counts of a process's CUDA handles; a process that is killed leaves
    them. Of those that are gone only: a number may be another process's already."""
    return [f"torch_{pid}_" for pid in pids if _status(pid) is None]


def remove_memory(*prefixes: str) -> None:
    """Take away the names in /dev/shm that begin so, also of semaphores. To be called when nobody is left who could
    make another."""
    beginnings = (*prefixes, *(SEMAPHORE + prefix for prefix in prefixes))
    try:
        names = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(beginnings)]
    except FileNotFoundError:  # this machine has no /dev/shm
        return
    for name in names:
        try:
            os.unlink(os.path.join(SHARED_MEMORY, name))
        except (FileNotFoundError, PermissionError):
            pass  # somebody else was first, or it became another user's


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _status(pid: int) -> tuple[int, int] | None:
    """Parent and session of a process that still runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[3]))


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:
        return False


def _with_descendants(pids: set[int], parents: dict[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, open_ends = set(pids), list(pids)
    while open_ends:
        new = [pid for pid in children.get(open_ends.pop(), []) if pid not in found]
        found.update(new)
        open_ends.extend(new)
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it went by itself, or it became another user's and is out of reach


def _note(events: str, killed: set[int]) -> None:
    """Write the last line of events.jsonl; the supervisor may have died inside the one before."""
    record = {"time": time.time(), "event": "supervisor_died", "killed_pids": sorted(killed)}
    with open(events, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record).encode() + b"\n")


def main(mark: str, events: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders: set[int] = set()
    for line in sys.stdin:
        if line.strip() == "done":
            return
        if not line.endswith("\n"):
            break  # half a pid would be another process's
        (leaders.add if line[0] == "+" else leaders.discard)(int(line[1:]))
    killed = kill_all(mark, leaders)
    remove_memory(memory_prefix(mark.partition("=")[2]), *torch_prefixes(killed | leaders))
    _note(events, killed)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
