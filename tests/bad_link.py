"""Two hosts joined by a cable that can be made bad: latency, loss, one direction cut, a NAT that forgets idle flows.

    with bad_link() as (left, right, cable):
        cable.delay_s, cable.loss = 0.05, 0.02
        cable.cut.add("left")       # what the left host sends is lost

Each host is a network namespace with a TUN device; a thread here carries the packets. (`tc netem` would do most of it,
but not every kernel has it.)
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.netns import Host, _ip, _number_and_hosts, _remove, _remove_of_dead_owners

TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 65536
TCP = 6


def skip_reason() -> str | None:
    from tests import netns

    if not os.access(TUN, os.R_OK | os.W_OK):
        return "a bad cable needs /dev/net/tun"
    return netns.skip_reason()


class Cable:
    """Set its attributes at any time."""

    def __init__(self, fds: dict[str, int]) -> None:
        self.delay_s = 0.0
        """One way, of every packet."""
        self.loss = 0.0
        """Probability, of every packet."""
        self.cut: set[str] = set()
        """Hosts whose packets get lost: "left", "right"."""
        self.forgets_after_s: float | None = None
        """A TCP flow that was idle for longer is dropped from then on, in silence."""
        self.packets = {"left": 0, "right": 0}
        self._fds = fds
        self._random = random.Random(0)
        self._seen: dict[tuple[int, int], float] = {}
        self._forgotten: set[tuple[int, int]] = set()
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._stopped, b"x")
        self._thread.join(5)
        for fd in (*self._fds.values(), self._stop, self._stopped):
            os.close(fd)

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for name, fd in self._fds.items():
                selector.register(fd, selectors.EVENT_READ, name)
            selector.register(self._stop, selectors.EVENT_READ, None)
            while True:
                wait = None if not self._waiting else max(0.0, self._waiting[0][0] - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.data is None:
                        return
                    self._take(key.data, os.read(key.fd, PACKET_BYTES))
                self._deliver()

    def _take(self, sender: str, packet: bytes) -> None:
        receiver = self._fds["right" if sender == "left" else "left"]
        if sender in self.cut or self._random.random() < self.loss or self._nat_drops(packet):
            return
        self.packets[sender] += 1
        heapq.heappush(self._waiting, (time.monotonic() + self.delay_s, next(self._order), receiver, packet))

    def _nat_drops(self, packet: bytes) -> bool:
        if self.forgets_after_s is None or packet[0] >> 4 != 4 or packet[9] != TCP:
            return False
        header = (packet[0] & 15) * 4
        ports = struct.unpack_from(">HH", packet, header)
        flow, now = (min(ports), max(ports)), time.monotonic()
        if now - self._seen.get(flow, now) > self.forgets_after_s:
            self._forgotten.add(flow)
        self._seen[flow] = now
        return flow in self._forgotten

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._waiting)
            try:
                os.write(fd, packet)
            except OSError:
                pass  # the host is gone


@contextmanager
def bad_link() -> Iterator[tuple[Host, Host, Cable]]:
    """Two fresh hosts, 10.77.x.1 and 10.77.x.2, and the cable between them."""
    _remove_of_dead_owners()
    left, right = _number_and_hosts("tun")
    fds: dict[str, int] = {}
    cable = None
    try:
        for name, host, other in (("left", left, right), ("right", right, left)):
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            fds[name] = _tun(host.interface)
            _ip("link", "set", host.interface, "netns", host.name)
            _ip("-n", host.name, "addr", "add", host.address, "peer", other.address, "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
        cable = Cable(fds)
        yield left, right, cable
    finally:
        if cable is not None:
            cable.close()
        for host in (left, right):
            _remove(host.name)


def _tun(name: str) -> int:
    fd = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd
