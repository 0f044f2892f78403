"""What a test process holds, and what of it a stretch of tests left behind."""

from __future__ import annotations

import gc
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from cosmos_actor.actors.keeper import belonging

MARK = f"COSMOS_ACTOR_TEST_SESSION={secrets.token_hex(8)}"
# In the environment of everything that tests start, so that an orphan of an orphan is still known as theirs.
os.environ.update([MARK.split("=")])
GRACE_S = 2.0
# For what is on its way out when a test ends: a killed process, a thread that closes its socket.
COUNTED = ("pipe:", "socket:", "/memfd:", "/dev/shm/")
# epoll and eventfd stay out of it: libraries keep one for a process's whole life


@dataclass(frozen=True)
class Snapshot:
    descriptors: dict[int, str]
    processes: set[int]
    shared_memory: set[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(_descriptors(), belonging(MARK), set(os.listdir("/dev/shm")))

    def leaks(self) -> list[str]:
        """One text for each thing that is held now, was not then, and does not go within the grace.

        What only one of the last two looks found came or went between them: another process's file in /dev/shm.
        """
        until = time.monotonic() + GRACE_S
        earlier = self._leaks_now()
        while earlier:
            gc.collect()
            time.sleep(0.05)
            now = self._leaks_now()
            if time.monotonic() >= until:
                return [leak for leak in now if leak in earlier]
            earlier = now
        return []

    def _leaks_now(self) -> list[str]:
        now = Snapshot.take()
        descriptors = [f"descriptor {fd} ({target})" for fd, target in now.descriptors.items()
                       if self.descriptors.get(fd) != target]
        processes = [f"process {pid} ({_command(pid)})" for pid in sorted(now.processes - self.processes)]
        memory = [f"/dev/shm/{name}" for name in sorted(now.shared_memory - self.shared_memory) if _is_ours(name)]
        return descriptors + [text for text in processes if "resource_tracker" not in text] + memory


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(COUNTED) and int(name) != _tracker_descriptor():
            found[int(name)] = target
    return found


def _tracker_descriptor() -> int | None:
    """multiprocessing starts one tracker for the whole process and keeps a pipe to it."""
    from multiprocessing import resource_tracker
    return resource_tracker._resource_tracker._fd


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "gone meanwhile"


def _is_ours(name: str) -> bool:
    """Held by this process or by nobody. What only another process holds is that one's business."""
    try:
        number = os.stat(f"/dev/shm/{name}").st_ino
    except OSError:
        return False
    holders = {pid for pid in os.listdir("/proc") if pid.isdigit() and _maps(pid, number)}
    return not holders or str(os.getpid()) in holders


def _maps(pid: str, number: int) -> bool:
    """By the file's number: a semaphore is mapped under another name than it has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return False
    fields = (line.split(maxsplit=5) for line in lines)
    return any(len(of) == 6 and of[4] == str(number) and of[5].startswith("/dev/shm/") for of in fields)
