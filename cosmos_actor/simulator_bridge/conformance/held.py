"""What this process holds: descriptors, threads, children, memory. Linux; elsewhere `can_be_seen` is false."""

from __future__ import annotations

import glob
import os
from typing import Dict, List, NamedTuple, Sequence

import numpy as np


class Held(NamedTuple):
    """At one time."""

    descriptors: Dict[int, str]
    """Number -> what it leads to."""
    threads: int
    """Also those that compiled code has started."""
    children: int

    def more_than(self, before: Held) -> Dict[str, int]:
        """Kind -> how many more."""
        return {"descriptors": len(self.descriptors) - len(before.descriptors),
                "threads": self.threads - before.threads, "child processes": self.children - before.children}

    def new_targets(self, before: Held) -> List[str]:
        """What the descriptors lead to that were not there before."""
        return sorted({target for number, target in self.descriptors.items()
                       if before.descriptors.get(number) != target})


def can_be_seen() -> bool:
    return os.path.exists("/proc/self/statm")


def held() -> Held:
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors[int(number)] = os.readlink("/proc/self/fd/" + number)
        except OSError:
            pass  # the one that the folder is read by
    return Held(descriptors, len(os.listdir("/proc/self/task")), len(_children()))


def _children() -> List[str]:
    found: List[str] = []
    for path in glob.glob("/proc/self/task/*/children"):
        try:
            with open(path) as file:
                found += file.read().split()
        except OSError:
            pass  # a thread that has just ended
    return found


def growth(sizes: Sequence[int], every: int) -> float:
    """Bytes an episode, of memory measured every so many episodes.

    The median of the differences: a cache that fills once, or an arena that the allocator takes once, is no growth.
    """
    return float(np.median(np.diff(np.asarray(sizes, np.float64)))) / every
