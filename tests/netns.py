"""Two hosts on one machine: network namespaces joined by a veth pair.

    with two_hosts() as (left, right):
        server = right.popen([python, "server.py", right.address])
        left.run([python, "client.py", right.address], timeout=20)

After the block no process of either host, no namespace and no interface is left, also when the body raised.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "cosmos"
COMMAND_LIMIT_S = 10.0
# An `ip` that waits for ever would hang the suite; every one of these takes milliseconds.
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One namespace. `address` is reachable from the other host and from nowhere else."""

    name: str
    address: str
    interface: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on this host; the process keeps its pid (ip execs it)."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(command), **options)

    def run(self, command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end, output as text; raises CalledProcessError unless `check=False`."""
        options = {"check": True, "capture_output": True, "text": True, **options}
        return subprocess.run(self.command(command), timeout=timeout, **options)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name, check=False).split()]


def skip_reason() -> str | None:
    """Why namespaces cannot be made here (None: they can). For `pytest.mark.skipif(skip_reason() is not None, …)`."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (Debian: iproute2)"
    return _trial_error()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two fresh hosts, 10.77.x.1 and 10.77.x.2, loopback up on both."""
    _remove_of_dead_owners()
    left, right = _number_and_hosts("veth")
    try:
        _make(left, right)
        yield left, right
    finally:
        for host in (left, right):
            _remove(host.name)


def _number_and_hosts(kind: str) -> tuple[Host, Host]:
    """Names that no other pair has; nothing is made."""
    number = next(_numbers)
    pid = os.getpid()
    return (Host(f"{PREFIX}-{pid}-{number}a", f"10.77.{number % 250}.1", f"{kind}-a"),
            Host(f"{PREFIX}-{pid}-{number}b", f"10.77.{number % 250}.2", f"{kind}-b"))


def _make(left: Host, right: Host) -> None:
    for host in (left, right):
        _ip("netns", "add", host.name)
        _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("link", "add", left.interface, "netns", left.name, "type", "veth",
        "peer", "name", right.interface, "netns", right.name)
    for host in (left, right):
        _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _ip("-n", host.name, "link", "set", host.interface, "up")


def _remove(name: str) -> None:
    for pid in _ip("netns", "pids", name, check=False).split():
        _kill(int(pid))
    _ip("netns", "del", name, check=False)


def _remove_of_dead_owners() -> None:
    """Namespaces outlive a test process that was killed; the next test takes them away."""
    for line in _ip("netns", "list", check=False).splitlines():
        parts = line.split()[0].split("-") if line.strip() else []
        if len(parts) == 3 and parts[0] == PREFIX and not Path("/proc", parts[1]).exists():
            _remove("-".join(parts))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _trial_error() -> str | None:
    name = f"{PREFIX}-{os.getpid()}-trial"
    try:
        _ip("netns", "add", name)
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces are not allowed here: {getattr(error, 'stderr', None) or error}".strip()
    _ip("netns", "del", name, check=False)
    return None


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    return done.stdout
