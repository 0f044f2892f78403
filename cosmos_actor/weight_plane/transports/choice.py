"""Which transport, and why, in one line. Pure: facts about the two ends in, a decision out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cosmos_actor.weight_plane.transports.interface import KINDS, TransportRefused

RAW = "raw://"
"""Addresses of raw streams; `tcp://` are the bulk plane's own, over ZeroMQ."""


@dataclass(frozen=True)
class End:
    """Where one of the two ends is."""

    host_id: str
    device: str = ""
    """The GPU (its UUID) that has the bytes, or wants them; empty: they are in the host's memory."""


@dataclass(frozen=True)
class Topology:
    """All that the choice depends on."""

    near: End
    """Who fetches."""
    far: End
    """Who published."""
    address: str
    """Where the publisher serves other hosts: `tcp://`, `raw://`, or empty for nowhere."""
    unmappable: str = ""
    """Why the publisher's memory can not be mapped here; empty: it can."""
    libraries: frozenset[str] = frozenset()
    """Of "torch", "cuda" and "nccl", what is there at both ends."""

    @property
    def one_host(self) -> bool:
        return self.near.host_id == self.far.host_id

    @property
    def one_gpu(self) -> bool:
        return self.one_host and bool(self.near.device) and self.near.device == self.far.device

    @property
    def two_gpus(self) -> bool:
        return bool(self.near.device and self.far.device) and not self.one_gpu


@dataclass(frozen=True)
class Choice:
    """The transport's name in `weights.transport`, and the reason as it is printed."""

    transport: str
    reason: str

    def __str__(self) -> str:
        return f"weights come by {self.transport}: {self.reason}"


def choose(wanted: str, topology: Topology) -> Choice:
    """The transport for these two ends. Raises TransportRefused naming what is missing for the one that is `wanted`.

    `wanted` is a value of `weights.transport`; "directory" is decided before there are two ends, and not here.
    """
    if wanted == "auto":
        return _best(topology)
    missing = _MISSING[wanted](topology)
    if missing:
        raise TransportRefused(f"weights.transport = \"{wanted}\" reaches {KINDS[wanted].reaches}, and here {missing}",
                               setting="weights.transport")
    return Choice(wanted, f"weights.transport asks for it ({_described(topology, wanted)})")


def _best(topology: Topology) -> Choice:
    """The first that serves, from the quickest on. Between hosts NCCL comes only by name: it trusts the network."""
    refused = []
    for name in ("cuda_ipc", "nccl", "shm", "stream"):
        missing = _MISSING[name](topology)
        if not missing and (name != "nccl" or topology.one_host):
            return Choice(name, _described(topology, name))
        refused.append(f"{name}: {missing}")
    raise TransportRefused("no transport reaches the publisher (" + "; ".join(refused) + ")",
                           setting="weights.transport")


def _shm(topology: Topology) -> str:
    if not topology.one_host:
        return "the publisher is on another host"
    return topology.unmappable


def _stream(topology: Topology) -> str:
    return "" if topology.address else "the publisher serves no other host: it has no address"


def _cuda_ipc(topology: Topology) -> str:
    if not topology.one_gpu:
        return "the two ends are not on one GPU"
    return _lacks(topology, "torch", "cuda")


def _nccl(topology: Topology) -> str:
    if not topology.two_gpus:
        return "the two ends are no two GPUs"
    return _lacks(topology, "torch", "cuda", "nccl")


def _lacks(topology: Topology, *names: str) -> str:
    absent = [name for name in names if name not in topology.libraries]
    if absent:
        return f"{' and '.join(absent)} is missing at one end"
    return "" if topology.address.startswith(RAW) else "the publisher has no raw:// address to meet at"


_MISSING: dict[str, Callable[[Topology], str]] = {
    "shm": _shm, "stream": _stream, "cuda_ipc": _cuda_ipc, "nccl": _nccl}


def _described(topology: Topology, transport: str) -> str:
    if topology.one_gpu:
        where = f"both ends are on GPU {topology.near.device}"
    elif topology.two_gpus:
        where = "the ends are two GPUs " + ("of one host" if topology.one_host else "of two hosts")
    elif topology.one_host:
        where = "both ends are on one host" + (f", but {topology.unmappable}" if topology.unmappable else "")
    else:
        where = "the ends are on two hosts"
    if transport != "stream":
        return where
    how = "raw TCP" if topology.address.startswith(RAW) else "ZeroMQ"
    return f"{where}; {how} from {topology.address}"
