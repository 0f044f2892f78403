"""What a simulator has started ends with it: a render server that is left behind would hold its GPU for ever."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Dict, List

_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on a grandchild whose parent ends becomes this process's child, instead of nobody's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end() -> int:
    """Kill every process that this one has started, directly or not, and that still runs; how many."""
    left = descendants(os.getpid())
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended by itself
    return len(left)


def descendants(pid: int) -> List[int]:
    """Of this process, as /proc has them now; zombies are none."""
    parents: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _living_childs_parent(int(name))
            parents.setdefault(parent, []).append(int(name))
    found, ways = [], [pid]
    while ways:
        children = parents.get(ways.pop(), [])
        found += children
        ways += children
    return found


def _living_childs_parent(pid: int) -> int:
    """0 for one that has ended."""
    try:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state in (b"Z", b"X") else int(parent)
