"""The parts of every process of a run: a bus with the settings' limits, the bulk plane, a source of weights."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

from cosmos_actor.actors.context import WeightSource
from cosmos_actor.actors.messages import AskSettings
from cosmos_actor.actors.role_names import REGISTRY
from cosmos_actor.bus import Bus, Identity, KeyRing, Limits, MemoryNetwork, MemoryTransport, ZmqTransport
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.faults import Faults, FaultyTransport
from cosmos_actor.recipes.mirror import as_dataclass
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.simulator_bridge.gateway import Gateway
from cosmos_actor.simulator_bridge.messages import DRIVER, SIMULATOR
from cosmos_actor.weight_plane.device_pull import DevicePull
from cosmos_actor.weight_plane.fanout import BusDesk, FanOutSource
from cosmos_actor.weight_plane.subscriber import WeightSubscriber
from cosmos_actor.weight_plane.transports.directory import VersionDirectory
from cosmos_actor.weight_plane.transports.directory_source import DirectorySource
from cosmos_actor.weight_plane.transports.interface import TO_GPUS
from cosmos_actor.weight_plane.transports.reader import TransportReader

ASK_DEADLINE_S = 20.0
"""How long an actor tries to reach its head before it gives up and says so."""
HANG_FACTOR = 1.5
"""Of a simulator's longest deadline: then its process ends itself, if the call has not ended by itself."""
PATIENT_S = 1e9
"""Inproc nobody is ever lost: the one thread may sit in a debugger for as long as it likes."""


def make_bus(identity: Identity, keys: KeyRing, settings: RunSettings, *, resolve_bulk: bool = True,
             listener: int | None = None) -> Bus:
    """The bus of one process. To be made and used on one event loop. `listener`: see `bus.socket.reserve`."""
    return Bus(identity, faulty(ZmqTransport(listener=listener), settings), keys, limits=bus_limits(settings),
               resolve_bulk=resolve_bulk, bulk=bulk_settings(settings))


def faulty(transport: Any, settings: RunSettings) -> Any:
    """The transport, with the network that `bus.faults` asks for."""
    faults = Faults.parse(settings.bus.faults, settings.run.seed)
    return FaultyTransport(transport, faults) if settings.bus.faults else transport


def inproc_bus(identity: Identity, network: MemoryNetwork, settings: RunSettings, *, resolve_bulk: bool = True) -> Bus:
    """The same over the in-memory transport."""
    limits = bus_limits(settings)
    if not settings.bus.faults:  # what they drop is only found by a deadline
        limits = replace(limits, lost_after_s=PATIENT_S, handshake_s=PATIENT_S)
    return Bus(identity, faulty(MemoryTransport(network), settings), None, limits=limits, resolve_bulk=resolve_bulk,
               bulk=bulk_settings(settings))


def gateway(bus: Bus, settings: RunSettings) -> Gateway | None:
    """Where simulators attach to this actor; None for a role that drives none. To be made before the bus starts."""
    if settings.run.experience != SIMULATOR or bus.identity.role != DRIVER:
        return None
    longest_s = max(settings.sim.step_s, settings.sim.reset_s)
    return Gateway(bus, resume_s=settings.sim.resume_s, silent_s=settings.sim.silent_s, squeeze=settings.sim.squeeze,
                   deadline_s=longest_s * HANG_FACTOR if longest_s < PATIENT_S else 0.0)


def weight_source(bus: Bus, settings: RunSettings) -> WeightSource:
    """Pulls versions of the run that `bus` belongs to."""
    wanted, run_id = settings.weights, bus.identity.run_id
    by_files = wanted.transport == "directory"
    if by_files and bus.identity.role != "reference":  # what that holds is no version of the policy's
        return DirectorySource(VersionDirectory(wanted.directory, run_id), run_id, _say)
    reference = bus.identity.role == "reference"  # it takes one version in its life, which is published from the host
    transport = "auto" if by_files or (reference and wanted.transport == "cuda_ipc") else wanted.transport
    reader = TransportReader(bus.bulk_reader, wanted=transport, streams=wanted.streams,
                             digested=wanted.protection != "trusted", device=_gpu, say=_say)
    return WeightSubscriber(
        reader, run_id, _fan_out(bus, reader, settings), delta="never" if reference else wanted.delta,
        device=DevicePull(reader.to_device), say=_say)


def _fan_out(bus: Bus, reader: TransportReader, settings: RunSettings) -> FanOutSource | None:
    """None: every bucket comes from the policy itself. Those who pass buckets on do it over streams."""
    if settings.weights.fan_out == "never" or settings.weights.transport in TO_GPUS:
        return None
    return FanOutSource(reader, bus.bulk_store, BusDesk(bus), patience_s=settings.weights.patience_s,
                        budget_bytes=settings.bulk.budget_bytes)


def _gpu() -> str:
    """Of this process; asked only where the policy gives from one."""
    from cosmos_actor.weight_plane.transports.pair import gpu

    return gpu()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def bus_limits(settings: RunSettings) -> Limits:
    return as_dataclass(settings.bus, Limits)  # type: ignore[no-any-return]


def bulk_settings(settings: RunSettings) -> BulkSettings:
    return as_dataclass(settings.bulk, BulkSettings)  # type: ignore[no-any-return]


def ask_settings(identity: Identity, keys: KeyRing, head: str) -> RunSettings:
    """The settings of the run behind `head`, for an actor on a host that has no file of them."""
    return RunSettings.model_validate(asyncio.run(_ask(identity, keys, head)), strict=False)


async def _ask(identity: Identity, keys: KeyRing, head: str) -> Any:
    """Over a link of its own, before the actor has its name in the run."""
    bus = Bus(replace(identity, actor=f"{identity.actor}?"), ZmqTransport(), keys)
    await bus.start(None)
    try:
        link = await bus.connect(head, role=REGISTRY, deadline_s=ASK_DEADLINE_S)
        return (await link.call(AskSettings(), deadline_s=ASK_DEADLINE_S)).settings
    finally:
        await bus.close(drain_s=0.5)
