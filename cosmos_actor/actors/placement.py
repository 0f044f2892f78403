"""Which roles share a process (ActorGroup), which share devices (DeviceGroup), what each actor runs with. Pure.

    grouping = per_role   every actor a process              placement = colocated      rollout on the policy's devices
    grouping = single     all roles in one process           placement = disaggregated  every role has its own devices

A combination that can not work is refused here, by name, before anything starts. A device is one GPU, named as
CUDA_VISIBLE_DEVICES names it; a host without GPUs has none, and then the placements do not differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cosmos_actor.actors.errors import UserError

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
GROUPINGS = ("per_role", "single")
PLACEMENTS = ("colocated", "disaggregated")
MAY_SHARE = frozenset({"rollout", "policy"})
"""They compute in turns. A third role on the device would find its memory taken in the middle of a step."""
ALLOCATION_ORDER = ("policy", "critic", "reference", "rollout")
"""Fewest alternatives first: ranks of one group stay side by side at the head of the host."""


class PlacementRefused(UserError):
    """This combination of grouping, placement, roles and devices can not work; the line says why and what to change."""

    def __init__(self, grouping: str, placement: str, why: str, remedy: str, *, setting: str) -> None:
        super().__init__(f"{grouping} x {placement} can not be placed: {why}; {remedy}", setting=setting)


@dataclass(frozen=True, kw_only=True)
class RoleDemand:
    """What one role asks for."""

    role: str
    count: int = 1
    """Actors that start on this host."""
    joining: int = 0
    """Actors that are expected from elsewhere."""
    ranks: int = 1
    """Processes of one torch.distributed group that make up one actor, a device each."""
    threads: int = 1
    python: str | None = None
    """Interpreter; None: the one that runs the job."""
    device: str | None = None
    """"cpu", "cuda", "auto" (cuda where there is one), or None for a role that runs no model."""
    devices: tuple[str, ...] = ()
    """Devices asked for by name; empty: given out here."""

    @property
    def devices_needed(self) -> int:
        return self.count * self.ranks


@dataclass(frozen=True, kw_only=True)
class PlacedActor:
    """One actor and what its process runs with."""

    role: str
    index: int
    python: str
    devices: tuple[str, ...]
    """One a rank; empty: the CPU."""
    ranks: int
    threads: int
    process: int
    """Actors with the same number share a process."""

    @property
    def actor(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def device(self) -> str:
        return "cuda" if self.devices else "cpu"

    @property
    def env(self) -> dict[str, str]:
        """For the process: it sees its own devices only, and its sums have a fixed order."""
        return {DEVICES_VARIABLE: ",".join(self.devices), "OMP_NUM_THREADS": str(self.threads)}


@dataclass(frozen=True)
class ActorGroup:
    """The actors that share one process."""

    process: int
    actors: tuple[str, ...]


@dataclass(frozen=True)
class DeviceGroup:
    """Roles that share devices."""

    devices: tuple[str, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Where every actor of this host runs, in the order they were asked for."""

    grouping: str
    placement: str
    actors: tuple[PlacedActor, ...]

    @property
    def actor_groups(self) -> tuple[ActorGroup, ...]:
        processes = sorted({placed.process for placed in self.actors})
        return tuple(
            ActorGroup(process, tuple(placed.actor for placed in self.actors if placed.process == process))
            for process in processes
        )

    @property
    def device_groups(self) -> tuple[DeviceGroup, ...]:
        roles = dict.fromkeys(placed.role for placed in self.actors if placed.devices)
        held = {role: tuple(sorted({d for a in self.actors if a.role == role for d in a.devices})) for role in roles}
        together: dict[tuple[str, ...], list[str]] = {}
        for role in roles:
            home = next((devices for devices in together if set(devices) & set(held[role])), held[role])
            together.setdefault(home, []).append(role)
        return tuple(DeviceGroup(devices, tuple(members)) for devices, members in together.items())


def place(
    demands: Sequence[RoleDemand], *, grouping: str, placement: str, devices: Sequence[str], python: str
) -> Plan:
    """The plan for one host that has `devices`; `python` runs what names no interpreter of its own.

    Raises PlacementRefused for the first reason found.
    """
    host = _Host(demands, grouping, placement, tuple(devices), python)
    for rule in (_unknown_names, _one_process, _missing_devices, _wrong_wishes, _colocation):
        for refusal in rule(host):
            raise refusal
    given = host.allocate()
    return Plan(grouping, placement, tuple(host.actors(given)))


class _Host:
    """The question: what is asked for, and of what."""

    def __init__(
        self, demands: Sequence[RoleDemand], grouping: str, placement: str, devices: tuple[str, ...], python: str
    ) -> None:
        self.demands, self.grouping, self.placement = tuple(demands), grouping, placement
        self.devices, self.python = devices, python
        self.by_role: Mapping[str, RoleDemand] = {demand.role: demand for demand in demands}

    def refuse(self, why: str, remedy: str, setting: str) -> PlacementRefused:
        return PlacementRefused(self.grouping, self.placement, why, remedy, setting=setting)

    def computes_on_device(self, demand: RoleDemand) -> bool:
        return demand.count > 0 and (demand.device == "cuda" or (demand.device == "auto" and bool(self.devices)))

    def on_devices(self) -> list[RoleDemand]:
        """Demands that get devices, in the order in which they choose."""
        chosen = [demand for demand in self.demands if self.computes_on_device(demand)]
        return sorted(chosen, key=lambda demand: (not demand.devices, ALLOCATION_ORDER.index(demand.role)))

    def shares(self, demand: RoleDemand) -> bool:
        """True for rollout where it lives on the policy's devices."""
        policy = self.by_role.get("policy")
        together = policy is not None and self.computes_on_device(policy)
        return self.placement == "colocated" and demand.role == "rollout" and together

    def allocate(self) -> dict[str, tuple[str, ...]]:
        """Role -> its devices. Raises PlacementRefused when the host has too few."""
        given: dict[str, tuple[str, ...]] = {}
        wanted = {device for demand in self.demands for device in demand.devices}
        free = [device for device in self.devices if device not in wanted]
        for demand in self.on_devices():
            if demand.devices or self.shares(demand):
                given[demand.role] = demand.devices
                continue
            if len(free) < demand.devices_needed:
                raise self._too_few(demand, len(free))
            given[demand.role] = tuple(free[: demand.devices_needed])
            del free[: demand.devices_needed]
        return given

    def actors(self, given: Mapping[str, tuple[str, ...]]) -> Iterator[PlacedActor]:
        process = 0
        for demand in self.demands:
            home = given.get(demand.role, ())
            if self.shares(demand) and not home:
                home = given["policy"]
            for index in range(demand.count):
                mine = home[index * demand.ranks : (index + 1) * demand.ranks]
                yield PlacedActor(
                    role=demand.role, index=index, python=demand.python or self.python, devices=mine,
                    ranks=demand.ranks, threads=demand.threads, process=process,
                )
                process += self.grouping == "per_role"

    def _too_few(self, demand: RoleDemand, free: int) -> PlacementRefused:
        why = f"{demand.role} needs {demand.devices_needed} devices of its own, {free} of {len(self.devices)} are free"
        if demand.role == "rollout":
            return self.refuse(why, "set `run.placement` = \"colocated\" or lower `rollout.count`", "run.placement")
        return self.refuse(
            why, f"set `{demand.role}.device` = \"cpu\" or lower what the other roles take", f"{demand.role}.device"
        )


def _unknown_names(host: _Host) -> Iterator[PlacementRefused]:
    if host.grouping not in GROUPINGS:
        yield host.refuse("there is no such grouping", f"choose from {', '.join(GROUPINGS)}", "run.grouping")
    if host.placement not in PLACEMENTS:
        yield host.refuse("there is no such placement", f"choose from {', '.join(PLACEMENTS)}", "run.placement")
    for demand in host.demands:
        if demand.device is not None and demand.role not in ALLOCATION_ORDER:
            yield host.refuse(f"{demand.role} is no role that runs a model", "leave its device out",
                              f"{demand.role}.device")


def _one_process(host: _Host) -> Iterator[PlacementRefused]:
    """What one process can not be: on several hosts, several ranks, two interpreters, two numbers of threads."""
    if host.grouping != "single":
        return
    remedy = "set `run.grouping` = \"per_role\""
    computing = [demand for demand in host.demands if demand.device is not None and demand.count]
    for demand in host.demands:
        role = demand.role
        if demand.joining:
            yield host.refuse(f"{demand.joining} {role} actors join from elsewhere, and one process listens to nobody",
                              remedy, "run.grouping")
        if demand.ranks > 1:
            yield host.refuse(f"{role} has {demand.ranks} ranks, and each is a process",
                              f"{remedy} or `{role}.ranks` = 1", f"{role}.ranks")
        if demand.python not in (None, host.python):
            yield host.refuse(f"{role} names another interpreter ({demand.python})",
                              f"{remedy} or leave `{role}.python` out", f"{role}.python")
    for demand in computing[1:]:
        first = computing[0]
        if demand.threads != first.threads:
            yield host.refuse(
                f"{first.role} wants {first.threads} threads and {demand.role} {demand.threads}, one process has one "
                "number", f"{remedy} or make them equal", f"{demand.role}.threads")


def _missing_devices(host: _Host) -> Iterator[PlacementRefused]:
    for demand in host.demands:
        wants = f"`{demand.role}.device` = \"{demand.device}\""
        if demand.count and demand.device == "cuda" and not host.devices:
            yield host.refuse(f"{wants}, and this host has no GPU", "set it to \"cpu\" or \"auto\"",
                              f"{demand.role}.device")
        for device in demand.devices:
            if device not in host.devices:
                present = ", ".join(host.devices) or "none"
                yield host.refuse(f"{demand.role} asks for device {device}, this host has {present}",
                                  f"change `{demand.role}.devices`", f"{demand.role}.devices")


def _wrong_wishes(host: _Host) -> Iterator[PlacementRefused]:
    """Devices by name: as many as there are ranks, on a role that uses them, and shared by nobody who may not."""
    taken: dict[str, str] = {}
    for demand in host.demands:
        setting = f"{demand.role}.devices"
        if not demand.devices:
            continue
        if not host.computes_on_device(demand):
            yield host.refuse(f"{demand.role} names devices and computes on none",
                              f"leave `{setting}` out or set its device to \"cuda\"", setting)
        if len(demand.devices) != demand.devices_needed:
            yield host.refuse(
                f"{demand.role} names {len(demand.devices)} devices for {demand.count} actors of {demand.ranks} ranks",
                f"name {demand.devices_needed} in `{setting}`", setting)
        for device in demand.devices:
            other = taken.setdefault(device, demand.role)
            if demand.devices.count(device) > 1:
                yield host.refuse(f"{demand.role} names device {device} twice", f"change `{setting}`", setting)
            if other != demand.role and not ({other, demand.role} == MAY_SHARE and host.placement == "colocated"):
                yield _shared(host, device, other, demand.role)


def _shared(host: _Host, device: str, first: str, second: str) -> PlacementRefused:
    if {first, second} == MAY_SHARE:
        return host.refuse(f"{first} and {second} both name device {device}",
                           "set `run.placement` = \"colocated\" or name other devices", "run.placement")
    return host.refuse(f"{first} and {second} both name device {device}, and only rollout and policy may share one",
                       f"change `{second}.devices`", f"{second}.devices")


def _colocation(host: _Host) -> Iterator[PlacementRefused]:
    """Rollout on the policy's devices: both compute there, and there is one for each rank of each."""
    policy, rollout = host.by_role.get("policy"), host.by_role.get("rollout")
    if host.placement != "colocated" or policy is None or rollout is None or not (policy.count and rollout.count):
        return
    on_device = {demand.role for demand in (policy, rollout) if host.computes_on_device(demand)}
    if len(on_device) == 1:
        where = on_device.pop()
        yield host.refuse(f"only {where} computes on a GPU, so the two share nothing",
                          "set `run.placement` = \"disaggregated\" or give both the same device",
                          "run.placement")
    if not on_device:
        return
    if policy.devices_needed > len(host.devices):
        yield host.refuse(f"policy has {policy.devices_needed} ranks, this host has {len(host.devices)} devices",
                          "lower `policy.ranks`", "policy.ranks")
    if rollout.devices_needed > policy.devices_needed:
        yield host.refuse(
            f"rollout has {rollout.devices_needed} ranks on the policy's {policy.devices_needed} devices",
            "lower `rollout.count` or set `run.placement` = \"disaggregated\"", "rollout.count")
    if policy.devices and rollout.devices and not set(rollout.devices) <= set(policy.devices):
        yield host.refuse("rollout and policy name different devices",
                          "set `run.placement` = \"disaggregated\" or name the same", "run.placement")
    if rollout.devices and not policy.devices:
        yield host.refuse("rollout names devices and policy, whose devices it shares, does not",
                          "name them in `policy.devices`", "policy.devices")
