"""What a bad network does, on purpose and by a seed: for tests, for `up --faults`, for the simulator.

It stands between a bus and its real transport. The handshake is not spared. Shared memory is not used: it has no
network.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from .errors import BusError
from .identity import Identity
from .keys import KeyRing
from .limits import Limits
from .transport import Transport, Wire, WireOwner

SETTING = "bus.faults"
RATES = ("drop", "dup", "reorder", "corrupt")
DEFAULT_START_S = 10.0
"""A partition that names no start comes this long after its actor's bus began: the job is at work by then."""

LONGEST_S = 7 * 24 * 3600.0
"""What is longer is a slip of the pen, and no timer takes it."""

REORDER_S = 0.01
"""How long a message is held back, at most, so that later ones overtake it."""

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True)
class Partition:
    """Actors of this role hear nobody and are heard by nobody, from `start_s` after their bus began, for `for_s`."""

    role: str
    for_s: float
    start_s: float = DEFAULT_START_S


@dataclass(frozen=True)
class Faults:
    """Probabilities are per message of a wire; one that is held back waits for up to `delay_s`, in order."""

    drop: float = 0.0
    dup: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    """One bit is flipped."""
    delay_s: float = 0.0
    partitions: Tuple[Partition, ...] = field(default_factory=tuple)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in RATES:
            if not 0 <= getattr(self, name) < 1:
                raise BusError(f"{name}={getattr(self, name):g}: a probability is at least 0 and below 1",
                               setting=SETTING)
        spans = [self.delay_s, *(span for cut in self.partitions for span in (cut.for_s, cut.start_s))]
        if not all(0 <= span <= LONGEST_S for span in spans):
            raise BusError(f"a delay or a partition of more than {LONGEST_S:g} s", setting=SETTING)

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Faults:
        """``drop=0.01,dup=0.01,reorder=0.01,corrupt=0.001,delay=50ms,partition=rollout:5s@20s``, any of them.

        Raises BusError that names the part which is none.
        """
        rates: Dict[str, Any] = {}
        partitions = []
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition("=")
            field_name = "delay_s" if name == "delay" else name
            if name == "partition":
                partitions.append(_partition(part, value))
            elif field_name in rates:
                raise BusError(f"{name} is given twice", setting=SETTING)
            elif name == "delay":
                rates[field_name] = _seconds(part, value)
            elif name in RATES:
                rates[name] = _number(part, value)
            else:
                raise BusError(f"unknown fault {name!r}: there are {', '.join(RATES)}, delay and partition",
                               setting=SETTING)
        return cls(partitions=tuple(partitions), seed=seed, **rates)


def _number(part: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BusError(f"{part}: expected a number such as 0.01", setting=SETTING) from None


def _seconds(part: str, value: str) -> float:
    found = _SPAN.fullmatch(value)
    if found is None:
        raise BusError(f"{part}: expected a time such as 50ms or 5s", setting=SETTING)
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _partition(part: str, value: str) -> Partition:
    role, _, span = value.partition(":")
    length, at, start = span.partition("@")
    if not role:
        raise BusError(f"{part}: expected partition=ROLE:5s or partition=ROLE:5s@20s", setting=SETTING)
    return Partition(role, _seconds(part, length), _seconds(part, start) if at else DEFAULT_START_S)


def flip_bit(frames: List[Any], bit: int) -> List[Any]:
    """A copy of the frames with one bit turned, counted over all of them."""
    copies = [bytearray(frame) for frame in frames]
    for copied in copies:
        if bit < 8 * len(copied):
            copied[bit // 8] ^= 1 << bit % 8
            break
        bit -= 8 * len(copied)
    return [bytes(copied) for copied in copies]


class FaultyWire:
    """What is sent through it suffers."""

    def __init__(self, wire: Wire, transport: FaultyTransport) -> None:
        self.wire = wire
        self.name = wire.name
        self.role = wire.role
        self._transport = transport
        self._order_until = 0.0

    def send(self, frames: List[Any]) -> bool:
        faults, chance, count = self._transport.faults, self._transport.chance, self._transport.count
        if self._transport.cut_off():
            count["partitioned"] += 1
            return True
        if chance(faults.drop):
            count["dropped"] += 1
            return True
        copies = 1
        if chance(faults.dup):
            count["duplicated"] += 1
            copies = 2
        if chance(faults.corrupt):
            count["corrupted"] += 1
            frames = self._transport.flip(frames)
        return all([self._send_one(frames, faults) for _ in range(copies)])

    def _send_one(self, frames: List[Any], faults: Faults) -> bool:
        now = self._transport.now()
        due = max(self._order_until, now + self._transport.up_to(faults.delay_s))
        if self._transport.chance(faults.reorder):
            self._transport.count["reordered"] += 1
            due += self._transport.up_to(max(faults.delay_s, REORDER_S))
        else:
            self._order_until = due
        if due <= now:
            return self.wire.send(frames)
        self._transport.later(due, self.wire, frames)
        return True

    def close(self) -> None:
        self._transport.forget(self)
        self.wire.close()


class _Owner:
    """Tells the bus of the wires that it knows: ours."""

    def __init__(self, owner: WireOwner, transport: FaultyTransport) -> None:
        self._owner = owner
        self._transport = transport

    def wire_up(self, wire: Wire) -> None:
        self._owner.wire_up(self._transport.ours(wire))

    def wire_frames(self, wire: Wire, frames: List[Any]) -> None:
        if self._transport.cut_off():
            self._transport.count["partitioned"] += 1
        else:
            self._owner.wire_frames(self._transport.ours(wire), frames)

    def wire_down(self, wire: Wire, reason: str, refused: bool) -> None:
        ours = self._transport.ours(wire)
        self._transport.forget(ours)
        self._owner.wire_down(ours, reason, refused)


class FaultyTransport:
    """A transport with a bad network in front of it."""

    between_processes = False

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.faults = faults
        self.count = dict.fromkeys(("dropped", "duplicated", "reordered", "corrupted", "partitioned"), 0)
        self._inner = inner
        self._ours: Dict[Any, FaultyWire] = {}
        self._random = random.Random()
        self._windows: List[Tuple[float, float]] = []

    def open(self, identity: Identity, keys: Optional[KeyRing], limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._random.seed(f"{self.faults.seed}/{identity.actor}")
        begun = self._loop.time()
        self._windows = [(begun + cut.start_s, begun + cut.start_s + cut.for_s)
                         for cut in self.faults.partitions if cut.role == identity.role]
        self._inner.open(identity, keys, limits)

    def listen(self, address: str, owner: WireOwner) -> str:
        return self._inner.listen(address, _Owner(owner, self))

    def dial(self, address: str, role: str, owner: WireOwner) -> FaultyWire:
        return self.ours(self._inner.dial(address, role, _Owner(owner, self)))

    def close(self, linger_ms: int) -> None:
        self._inner.close(linger_ms)
        self._ours.clear()

    def statistics(self) -> Dict[str, Any]:
        return {**self._inner.statistics(), "faults": dict(self.count)}

    # -- for its wires ------------------------------------------------------------------------------------------

    def ours(self, wire: Wire) -> FaultyWire:
        known = self._ours.get(wire)
        if known is None:
            known = self._ours[wire] = FaultyWire(wire, self)
        return known

    def forget(self, ours: FaultyWire) -> None:
        self._ours.pop(ours.wire, None)

    def now(self) -> float:
        return self._loop.time()

    def chance(self, probability: float) -> bool:
        return probability > 0 and self._random.random() < probability

    def up_to(self, seconds: float) -> float:
        return self._random.uniform(0, seconds) if seconds else 0.0

    def flip(self, frames: List[Any]) -> List[Any]:
        """A copy with one bit turned, any bit of any frame."""
        return flip_bit(frames, self._random.randrange(8 * sum(map(len, frames))))

    def later(self, due: float, wire: Wire, frames: List[Any]) -> None:
        self._loop.call_at(due, wire.send, frames)

    def cut_off(self) -> bool:
        return bool(self._windows) and any(begin <= self.now() < end for begin, end in self._windows)
