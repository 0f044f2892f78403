"""What the kernel says about the processes of this host, in words for a person."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATES = {
    "T": "stopped by a signal (kill -CONT lets it go on)", "t": "stopped by a debugger", "R": "running on a CPU",
    "S": "asleep", "D": "waiting for a disk or a device", "Z": "dead and not reaped",
}


def process_state(pid: int) -> str:
    """One of STATES, or that there is no such process."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return STATES.get(letter, f"in state {letter}")


def process_lives(pid: int) -> bool:
    """Whether it may still hold anything; one that is stopped by a signal does."""
    return process_state(pid) not in ("gone", STATES["Z"])


def with_processes(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a run's head, with what the kernel says now about each process of this host."""
    here = socket.gethostname()

    def look(entry: Mapping[str, Any]) -> dict[str, Any]:
        local = entry.get("pid") and entry.get("host", here) == here
        return {**entry, "process": process_state(int(entry["pid"])) if local else ""}

    return {**facts, **{name: [look(entry) for entry in facts.get(name, [])] for name in ("members", "children")}}
