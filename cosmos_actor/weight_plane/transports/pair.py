"""A collective of exactly two: who published gives, who wants takes, over NCCL or Gloo. Imports torch.

    taker ──PAIR──> giver: makes a store, says its port ──> both make the group
    taker ──PAIRED (an array)──> giver: found it ──> both broadcast it

Asks and answers go over a raw stream, which also tells at once when the other process is gone. The group is no part of
torch's default group and registers nowhere, so an FSDP group in the same process does not know of it. After any failure
both sides throw the group away, and the next fetch makes another: nobody else is in it, so nobody else waits.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from cosmos_actor.weight_plane.flat import aside
from cosmos_actor.weight_plane.flat_store import Found
from cosmos_actor.weight_plane.transports.giving import GivingRefused
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.raw_wire import PAIR, Ask

distributed: Any = torch.distributed
BACKENDS = ("gloo", "nccl")
"""By number in an ask."""
GIVER, TAKER = 0, 1
SETUP_S = 20.0
"""Of a group: NCCL takes about one second, the first one in a process with a cold cache several."""
GIVER_SILENT_S = 10.0
"""The giver's patience with a taker; the taker's own is bulk.overdue_s."""
SLOWEST_BYTES = 50 << 20
"""A second more of patience for each: a slow network is no dead member."""
PIECES_AHEAD = 4
"""Broadcasts asked of the backend before the first of them is done: between two GPUs one of 256 MiB takes less than a
millisecond, and to wait for each would leave the wire idle for a tenth of it."""
SPIN_S = 0.005
"""A bucket of 16 MiB takes 50 microseconds between two GPUs: a sleep would be most of it."""
LOOK_S = 0.0001
LOST_LOOK_S = 0.1
"""Between two looks whether the other end of a group that is being made is gone."""
THROWN_AWAY_AFTER_S = 2.0
"""A group that is not torn down by then is left to its own thread."""
_MEETING = struct.Struct("<H16s")
NCCL_ENVIRONMENT = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
                    "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""No watchdog: when a member is lost it would end the whole process, or have that of the trainer's group do it. That
is ours to decide, and only of this group. With the first there is none; the others are for one that is there still."""


class PairGroup:
    """Two members. Making it and every broadcast end within a bound, or raise TransportLost and leave it unusable."""

    def __init__(self, backend: str, store: Any, rank: int, host: str, device: torch.device,
                 lost: Callable[[], bool]) -> None:
        """`host`: the address of this end, where Gloo listens for the other. `lost`: see `broadcast`."""
        self._device = device = numbered(device)
        self._group = _within(SETUP_S, f"a {backend} group of two",
                              lambda: _make(backend, store, rank, host, device), lost)
        self.broken = False

    def broadcast(self, tensor: torch.Tensor, lost: Callable[[], bool], silent_s: float = GIVER_SILENT_S,
                  piece_bytes: int = 0) -> None:
        """From the giver's tensor ([nbytes] uint8) into the taker's, in pieces of `piece_bytes`; 0: all at once.

        `lost` tells when the other end is known to be gone. Who is silent is given up `bound_s` after a piece.
        """
        pieces = list(tensor.split(piece_bytes)) if piece_bytes else [tensor]
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        try:
            with aside(self._device):
                for piece in pieces:
                    under_way.append((self._begin(piece, silent_s), piece))
                    if len(under_way) >= PIECES_AHEAD:
                        _await(*under_way.popleft(), lost, silent_s)
                while under_way:
                    _await(*under_way.popleft(), lost, silent_s)
        except RuntimeError as error:
            self.close()
            raise TransportLost(f"the group of two failed: {_first_line(error)}") from error
        except TransportLost:
            self.close()
            raise

    def _begin(self, piece: torch.Tensor, silent_s: float) -> Any:
        options = _broadcast_of_giver()
        options.timeout = timedelta(seconds=PIECES_AHEAD * bound_s(piece.nbytes, silent_s))
        return self._group.broadcast([piece], options)

    def close(self) -> None:
        """Tear it down on a thread of its own: with a member that is gone that may take as long as it likes."""
        if self.broken:
            return
        self.broken = True
        holder = [self._group]
        del self._group
        thread = threading.Thread(target=_throw_away, args=(holder,), name="pair-end", daemon=True)
        thread.start()
        thread.join(THROWN_AWAY_AFTER_S)


class PairGiving:
    """How a server gives arrays by groups of two: one group for each asker."""

    def __init__(self, device: str = "cpu", freed: Callable[[int], bool] = lambda generation: False) -> None:
        """`freed`: whether the array of a generation is to be given no more; who is in the midst of it loses it."""
        self.device = torch.device(device)
        self.freed = freed

    def to(self, asker: socket.socket) -> _PairTurn:
        return _PairTurn(self, asker)


class _PairTurn:
    """One asker's group, on the giver's side. Runs on the asker's own thread of the server."""

    def __init__(self, giving: PairGiving, asker: socket.socket) -> None:
        self._giving, self._asker = giving, asker
        self._group: PairGroup | None = None

    def prepare(self, ask: Ask, found: Any) -> tuple[bytes, Callable[[], None]]:
        if ask.kind == PAIR:
            return self._meet(ask)
        if self._group is None or self._group.broken:
            raise GivingRefused("there is no group for it yet")
        giving, group = self._giving, self._group
        tensor = found.tensor if isinstance(found, Found) else torch.from_numpy(found).to(giving.device)

        def lost() -> bool:
            return gone(self._asker) or giving.freed(ask.generation)

        return b"", lambda: group.broadcast(tensor, lost, piece_bytes=ask.first)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _meet(self, ask: Ask) -> tuple[bytes, Callable[[], None]]:
        backend = BACKENDS[ask.first] if ask.first < len(BACKENDS) else f"backend {ask.first}"
        problem = unusable(backend, self._giving.device)
        if problem:
            raise GivingRefused(problem)
        self.close()
        host = self._asker.getsockname()[0]
        store = distributed.TCPStore(host, 0, 2, True, timedelta(seconds=SETUP_S), wait_for_workers=False)
        name = os.urandom(16)

        def make() -> None:
            prefixed = distributed.PrefixStore(name.hex(), store)
            self._group = PairGroup(backend, prefixed, GIVER, host, self._giving.device, lambda: gone(self._asker))

        return _MEETING.pack(store.port, name), make


def take_part(backend: str, meeting: bytes, connection: socket.socket, device: torch.device) -> PairGroup:
    """The taker's side of the group that the giver's answer `meeting` describes."""
    port, name = _MEETING.unpack(meeting)
    giver, here = connection.getpeername()[0], connection.getsockname()[0]

    def lost() -> bool:
        return gone(connection)

    store = _within(SETUP_S, f"the giver's store at {giver}:{port}", lambda: distributed.TCPStore(
        giver, port, 2, False, timedelta(seconds=SETUP_S), wait_for_workers=False), lost)
    return PairGroup(backend, distributed.PrefixStore(name.hex(), store), TAKER, here, device, lost)


def bound_s(nbytes: int, silent_s: float) -> float:
    """How long a broadcast of so much may take before the other member of it counts as dead."""
    return silent_s + nbytes / SLOWEST_BYTES


def _await(work: Any, piece: torch.Tensor, lost: Callable[[], bool], silent_s: float) -> None:
    """Until it is done. Raises TransportLost, and RuntimeError of the backend."""
    begun = time.monotonic()
    limit_s = bound_s(piece.nbytes, silent_s)
    while not work.is_completed():
        waited = time.monotonic() - begun
        if waited > SPIN_S:
            time.sleep(LOOK_S)
            if lost():
                raise TransportLost("the other member of the group is gone, or what it gave was freed")
        if waited > limit_s:
            raise TransportLost(f"the other member of the group is silent for {limit_s:g} s")
    work.wait()


def gone(connection: socket.socket) -> bool:
    """Whether the other end hung up, or its process ended; also behind asks of it that nobody has read yet."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # closed at this end
        return True


def unusable(backend: str, device: torch.device) -> str:
    """Why this backend can not be used on `device` here; empty: it can."""
    if backend == "gloo":
        return "" if distributed.is_gloo_available() else "this torch has no gloo"
    if backend != "nccl":
        return f"{backend} is none of {', '.join(BACKENDS)}"
    if not distributed.is_nccl_available():
        return "this torch has no nccl"
    return "" if device.type == "cuda" and torch.cuda.is_available() else f"nccl wants a GPU, this end is on {device}"


def numbered(device: torch.device) -> torch.device:
    """With its number: a thread begins on GPU 0, whichever its process computes on, and NCCL wants to be told."""
    return torch.device("cuda", gpu_number()) if device.type == "cuda" and device.index is None else device


def gpu_number() -> int:
    """Of the GPU that this process computes on, among those that it sees."""
    return int(torch.cuda.current_device())


def gpu() -> str:
    """UUID of the GPU that this process computes on; empty: none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(gpu_number()).uuid)


def _broadcast_of_giver() -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = GIVER, 0
    return options


def _make(backend: str, store: Any, rank: int, host: str, device: torch.device) -> Any:
    if backend == "gloo":
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=SETUP_S)
        return distributed.ProcessGroupGloo(store, rank, 2, options)
    torch.cuda.set_device(device)  # of this thread: the communicator is made on the thread's own device
    with _environment(NCCL_ENVIRONMENT):
        nccl = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # beside a training step
        nccl._timeout = timedelta(days=1)  # Ours are shorter, and end the group alone.
        group = distributed.ProcessGroupNCCL(store, rank, 2, nccl)
    with aside(device):
        # NCCL makes its communicator at the first collective, and waits for the other member without a bound.
        group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], _broadcast_of_giver()).wait()
    return group


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For a library that reads its settings from there when an object is made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _within(limit_s: float, what: str, make: Callable[[], Any], lost: Callable[[], bool]) -> Any:
    """`make()`, on a daemon thread that is left behind when it takes longer or the other end is lost meanwhile: what it
    waits for may never come. Raises TransportLost."""
    made: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # told to who waits
            failed.append(error)

    thread = threading.Thread(target=run, name="pair-begin", daemon=True)
    thread.start()
    until = time.monotonic() + limit_s
    while thread.is_alive() and time.monotonic() < until:
        thread.join(LOST_LOOK_S)
        if thread.is_alive() and lost():
            raise TransportLost(f"{what} was not made: the other end is gone")
    if failed:
        raise TransportLost(f"{what} was not made: {_first_line(failed[0])}") from failed[0]
    if not made:
        raise TransportLost(f"{what} was not made within {limit_s:g} s: the other end is silent, or a port between the"
                            " two is closed")
    return made[0]


def _throw_away(holder: list[Any]) -> None:
    group = holder.pop()
    try:
        group.abort()
    except RuntimeError:
        pass  # It was broken already.


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
