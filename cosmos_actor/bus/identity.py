"""Who is speaking: run, role, actor and incarnation; and which host that is."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from functools import lru_cache

from .errors import BusError


@dataclass(frozen=True)
class Identity:
    """One life of one actor. Two lives of the same actor never compare equal."""

    run_id: str
    role: str
    actor: str
    incarnation: str

    def __post_init__(self) -> None:
        for name in ("run_id", "role", "actor", "incarnation"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or len(value) > 128:
                raise BusError(f"identity field {name} must be a text of 1..128 characters, got {value!r}")

    def __str__(self) -> str:
        return f"{self.actor}/{self.incarnation[:8]}"


def new_incarnation() -> str:
    """A name no other life has: 32 hex digits."""
    return uuid.uuid4().hex


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"


def _inode(path: str) -> str:
    try:
        return str(os.stat(path).st_ino)
    except OSError:
        return "unknown"


def _device(path: str) -> str:
    try:
        return str(os.stat(path).st_dev)
    except OSError:
        return "unknown"


@lru_cache(maxsize=None)
def host_id() -> str:
    """Equal in two processes only if they share kernel boot, network namespace and /dev/shm.

    Two network namespaces of one machine are two hosts.
    """
    boot = _first_line("/proc/sys/kernel/random/boot_id")
    return ":".join((boot, _inode("/proc/self/ns/net"), _device("/dev/shm")))
