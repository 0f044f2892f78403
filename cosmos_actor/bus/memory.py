"""Wires inside one event loop, under the same contract as the real ones. For ``--inproc`` and for tests."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Callable, Dict, List, Optional

from .errors import AddressInUse
from .identity import Identity
from .keys import KeyRing
from .limits import Limits
from .transport import WireOwner

Fault = Callable[["MemoryWire", List[bytes]], Optional[List[bytes]]]


class MemoryNetwork:
    """Addresses of one event loop. A test sets ``fault``: (sending wire, frames) -> what arrives, None: nothing."""

    def __init__(self) -> None:
        self.listeners: Dict[str, MemoryTransport] = {}
        self.fault: Optional[Fault] = None
        self.counter = itertools.count(1)


class MemoryWire:
    """One end; ``cut`` on either breaks the connection as a pulled plug would, both ends are told."""

    def __init__(self, network: MemoryNetwork, owner: WireOwner, name: str) -> None:
        self.network = network
        self.owner = owner
        self.name = name
        self.role: Optional[str] = None
        self.other: Optional[MemoryWire] = None
        self.open = True

    def send(self, frames: List[Any]) -> bool:
        if not self.open or self.other is None:
            return False
        copied: Optional[List[bytes]] = [bytes(frame) for frame in frames]
        if self.network.fault is not None and copied is not None:
            copied = self.network.fault(self, copied)
        if copied is not None:
            asyncio.get_running_loop().call_soon(self.other.deliver, copied)
        return True

    def deliver(self, frames: List[bytes]) -> None:
        if self.open:
            self.owner.wire_frames(self, frames)

    def close(self) -> None:
        if self.open:
            self.open = False
            if self.other is not None:
                asyncio.get_running_loop().call_soon(self.other.went_down, "the other end closed", False)

    def cut(self) -> None:
        for end in (self, self.other):
            if end is not None:
                asyncio.get_running_loop().call_soon(end.went_down, "connection lost", False)

    def went_down(self, reason: str, refused: bool) -> None:
        if self.open:
            self.open = False
            self.owner.wire_down(self, reason, refused)


class MemoryTransport:
    """Many buses share one ``MemoryNetwork``; addresses are ``memory://NAME``."""

    between_processes = False

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.wires: List[MemoryWire] = []
        self.address = ""
        self.owner: Optional[WireOwner] = None

    def open(self, identity: Identity, keys: Optional[KeyRing], limits: Limits) -> None:
        self.actor = identity.actor

    def listen(self, address: str, owner: WireOwner) -> str:
        if not address.startswith("memory://") or address == "memory://":
            address = f"memory://{self.actor}-{next(self.network.counter)}"
        if address in self.network.listeners:
            raise AddressInUse(f"{address} is in use", setting="listen")
        self.network.listeners[address] = self
        self.address, self.owner = address, owner
        return address

    def dial(self, address: str, role: str, owner: WireOwner) -> MemoryWire:
        near = MemoryWire(self.network, owner, f"{address}#{next(self.network.counter)}")
        self.wires.append(near)
        listener = self.network.listeners.get(address)
        loop = asyncio.get_running_loop()
        if listener is None or listener.owner is None:
            loop.call_soon(near.went_down, f"nobody listens at {address}", False)
            return near
        far = MemoryWire(self.network, listener.owner, near.name)
        near.other, far.other = far, near
        listener.wires.append(far)
        loop.call_soon(owner.wire_up, near)
        return near

    def close(self, linger_ms: int) -> None:
        self.network.listeners.pop(self.address, None)
        for wire in self.wires:
            wire.close()
        self.wires.clear()

    def statistics(self) -> Dict[str, Any]:
        return {"kind": "memory", "wires": sum(wire.open for wire in self.wires)}
