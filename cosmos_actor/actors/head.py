"""The head of a run: the place that every actor dials first, and that knows who is here.

It answers with the run's settings, keeps the registry, and tells everybody about each change of it. It carries no data,
so its own death holds nobody up: the next head knows from the journal who was here, and each actor comes to it by
itself. Who does not within RETURN_S is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cosmos_actor.actors.examined import serve_examination
from cosmos_actor.actors.json_lines import ForgivingWriter
from cosmos_actor.actors.messages import (
    MEMBERSHIP_TOPIC,
    PROCESSES_TOPIC,
    READY,
    STATUS_TOPIC,
    ActorStatus,
    Announce,
    AskSettings,
    JobFinished,
    Leaving,
    Member,
    Membership,
    Processes,
    RunSettingsReply,
    StopActor,
    plain,
)
from cosmos_actor.actors.registry import Registry
from cosmos_actor.actors.role_names import SUPERVISOR, SUPERVISOR_ACTOR
from cosmos_actor.actors.run_directory import write_whole
from cosmos_actor.bus import Bus, BusError, Link
from cosmos_actor.bus.handshake import Introduction
from cosmos_actor.bus.probe import refuses

NAME_TAKEN = "the run has an actor named"

PUBLISH_EVERY_S = 0.05
"""Membership goes to everybody at most so often: a thousand actors that join at once are not a million messages."""

PROBES, PROBE_PAUSE_S, PROBE_DEADLINE_S = 5, 0.3, 1.0
"""How often the head looks whether the process of a joined actor still listens, after the connection to it broke."""

RETURN_S = 10.0
"""How long a head that was restarted waits for those who were here before."""

STOP_JOINED_DEADLINE_S = 2.0
"""How long the head waits for a joined actor to hear that the run is over; it then finds out by itself."""


class Head:
    """Membership over the bus. `on_ready(actor, incarnation)`, `on_status(actor, incarnation, status)` and
    `on_finished(message)` tell whoever owns the processes; that one may be linked and publish `Processes`.

    `journal(record)` gets what the next head needs; `known` are the records of the one before.
    """

    def __init__(self, bus: Bus, settings: Mapping[str, Any], seed: int, *, status_path: Path | None = None,
                 events: ForgivingWriter | None = None, clock: Callable[[], float] = lambda: 0.0,
                 on_ready: Callable[[str, str], None] = lambda actor, incarnation: None,
                 on_status: Callable[[str, str, ActorStatus], None] = lambda actor, incarnation, status: None,
                 on_finished: Callable[[JobFinished], Any] = lambda message: None,
                 journal: Callable[[Mapping[str, Any]], None] = lambda record: None,
                 known: Iterable[Mapping[str, Any]] = (), return_s: float = RETURN_S) -> None:
        self.bus = bus
        self.registry = Registry(journal)
        self.processes = Processes([], {}, "")
        """The newest word of the processes' owner."""
        for actor, incarnation, reason in self.registry.replay(known):
            bus.forget(actor, incarnation, reason)
        self._absent = {member.actor: member.incarnation for member in self.registry.membership().members}
        self._return_s = return_s
        self.statuses: dict[str, ActorStatus] = {}
        self._told_at: dict[str, float] = {}
        self._settings, self._seed = dict(settings), seed
        self._status_path, self._events, self._clock = status_path, events, clock
        self._on_ready, self._on_status, self._on_finished = on_ready, on_status, on_finished
        self.address = ""
        self._newest = self.registry.membership()
        self._publishing: asyncio.TimerHandle | None = None
        self._published_at = -PUBLISH_EVERY_S
        self._probes: set[asyncio.Task[None]] = set()

    async def start(self, listen: str) -> str:
        """Listen; the address that actors dial."""
        bus = self.bus
        bus.serve(AskSettings, self._settings_asked)
        bus.serve(Announce, self._announced)
        bus.serve(Leaving, self._leaving)
        bus.serve(JobFinished, self._finished)
        bus.serve_state(STATUS_TOPIC, self._status)
        bus.serve_state(PROCESSES_TOPIC, self._processes)
        serve_examination(bus, self._clock)
        bus.on_link_down(self._link_down)
        bus.on_wire_down(self._wire_down)
        bus.admit_by(self._objection)
        self.address = await bus.start(listen)
        if self._absent:
            self._publish_now()
            asyncio.get_running_loop().call_later(self._return_s, self._give_up_absent)
        return self.address

    def exited(self, actor: str, incarnation: str, reason: str) -> None:
        """The process of this incarnation is gone: nobody needs to wait to notice."""
        member = self.registry.member(actor)
        if member is not None and member.incarnation == incarnation:
            self._depart(member, reason)

    async def stop_joined(self, reason: str) -> None:
        """Tell the actors that joined from elsewhere that the run is over."""
        for member in self.registry.membership().members:
            link = self.bus.links.get(member.actor)
            if member.joined and link is not None:
                try:
                    await link.call(StopActor(reason), deadline_s=STOP_JOINED_DEADLINE_S)
                except BusError:
                    continue  # it will see the link go

    def members(self) -> list[dict[str, Any]]:
        """Who is here and how they are, by name: the member, its last status, and how old that and its last word are.

        silent_s leaves out a pause that it declared; heard_s does not; status_s is the age of the status.
        """
        now, found = self.bus.clock.now(), []
        for member in sorted(self.registry.membership().members, key=lambda member: member.actor):
            told, link = self.statuses.get(member.actor), self.bus.links.get(member.actor)
            entry = plain(member)
            if told is not None:
                entry.update(vars(told))
                entry["status_s"] = round(now - self._told_at[member.actor], 2)
            if link is not None:
                link.liveness.look(now)
                entry["heard_s"] = round(link.liveness.silent_s(now), 2)
                entry["silent_s"] = round(link.liveness.unexcused_s(now), 2)
            found.append(entry)
        return [*found, *(driven for entry in found for driven in driven_members(entry))]

    def write_status(self, more: Mapping[str, Any]) -> None:
        """status.json: who is here and how they are, and `more`."""
        if self._status_path is not None:
            status = {"time": self._clock(), "pid": os.getpid(), "head": self.address,
                      "supervisor_silent_s": self._silent_s(SUPERVISOR_ACTOR), "members": self.members(), **more}
            write_whole(self._status_path, json.dumps(status))

    def _silent_s(self, actor: str) -> float | None:
        link = self.bus.links.get(actor)
        if link is None:
            return None
        now = self.bus.clock.now()
        link.liveness.look(now)
        return round(link.liveness.silent_s(now), 2)

    def _objection(self, theirs: Introduction) -> str | None:
        """A name belongs to one living incarnation; a restarted actor comes after its end was reported."""
        known = self.registry.member(theirs.actor)
        if known is None or known.incarnation == theirs.incarnation or theirs.actor in self._absent:
            return None
        return f"{NAME_TAKEN} {theirs.actor} already; take another name with --name"

    def _settings_asked(self, message: AskSettings, link: Link) -> RunSettingsReply:
        return RunSettingsReply(self._settings, self._seed)

    def _announced(self, message: Announce, link: Link) -> None:
        self.statuses.pop(link.peer.actor, None)
        returned = self._absent.pop(link.peer.actor, None) == link.peer.incarnation
        self._publish(self.registry.announce(link.peer, message))
        if message.joined and not returned and self._events is not None:
            self._events.append({"time": self._clock(), "event": "joined", "actor": link.peer.actor, "pid": message.pid,
                                 "interpreter": message.python, "host": message.host})
        self._on_ready(link.peer.actor, link.peer.incarnation)

    def _leaving(self, message: Leaving, link: Link) -> None:
        self._publish(self.registry.leaving(link.peer.actor, link.peer.incarnation))

    async def _finished(self, message: JobFinished, link: Link) -> None:
        told = self._on_finished(message)
        if told is not None:
            await told

    def _processes(self, processes: Processes, link: Link) -> None:
        """Also what happened while there was no head."""
        if link.role != SUPERVISOR:
            return
        self.processes = processes
        for member in self.registry.membership().members:
            reason = processes.exited.get(member.incarnation)
            if reason is not None:
                self._depart(member, reason)

    def _status(self, status: ActorStatus, link: Link) -> None:
        member = self.registry.member(link.peer.actor)
        if member is not None and member.incarnation == link.peer.incarnation:
            self.statuses[member.actor], self._told_at[member.actor] = status, self.bus.clock.now()
            if status.state == READY and not member.ready:
                self._publish(self.registry.ready(member.actor, member.incarnation))
            self._on_status(member.actor, member.incarnation, status)

    def _link_down(self, link: Link, reason: str) -> None:
        member, newer = self.registry.member(link.peer.actor), self.bus.links.get(link.peer.actor)
        if newer is not None and newer.peer.incarnation == link.peer.incarnation:
            return  # it lost the link before we did, and is back already
        if member is not None and member.incarnation == link.peer.incarnation:
            self._depart(member, f"left: {reason}" if member.leaving else reason)

    def _give_up_absent(self) -> None:
        running = {child["incarnation"] for child in self.processes.children if child.get("pid")}
        for actor, incarnation in list(self._absent.items()):
            if incarnation in running:
                continue  # its loop stands still; whether for too long is the supervisor's to say
            self.exited(actor, incarnation, f"did not come back within {self._return_s:g} s of the registry's restart")

    def _wire_down(self, link: Link) -> None:
        member = self.registry.member(link.peer.actor)
        if member is not None and member.joined and member.incarnation == link.peer.incarnation:
            probe = asyncio.get_running_loop().create_task(self._look_for(member))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _look_for(self, member: Member) -> None:
        """Nobody tells of a process that died on another host; but its port refuses then, a bad network does not."""
        for _ in range(PROBES):
            if await refuses(member.address, PROBE_DEADLINE_S):
                reason = f"nothing listens at {member.address} any more: its process is gone"
                self.exited(member.actor, member.incarnation, reason)
                return
            await asyncio.sleep(PROBE_PAUSE_S)

    def _depart(self, member: Member, reason: str) -> None:
        self.statuses.pop(member.actor, None)
        self._absent.pop(member.actor, None)
        if member.joined and self._events is not None:
            self._events.append({"time": self._clock(), "event": "departed", "actor": member.actor, "reason": reason})
        self._publish(self.registry.departed(member.actor, member.incarnation, reason))
        self.bus.forget(member.actor, member.incarnation, reason)

    def _publish(self, membership: Membership) -> None:
        """Now, or with all that changes until PUBLISH_EVERY_S after the time before: everybody gets the whole of it."""
        self._newest = membership
        if self._publishing is None:
            loop = asyncio.get_running_loop()
            self._publishing = loop.call_at(max(loop.time(), self._published_at + PUBLISH_EVERY_S), self._publish_now)

    def _publish_now(self) -> None:
        self._publishing = None
        self._published_at = asyncio.get_running_loop().time()
        self.bus.publish_state(MEMBERSHIP_TOPIC, self._newest)


def driven_members(driver: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Simulators, which have no link to the head: what their driver, an entry of `Head.members`, says of them."""
    for told in (driver.get("statistics") or {}).get("simulators", []):
        doing = {"what": told["doing"], "for_s": told["for_s"], "still_s": told["for_s"]}
        statistics = {"computing": doing} if told["doing"] else {"idle_s": told["for_s"]}
        yield {
            "role": told["role"], "actor": told["actor"], "incarnation": told["life"], "address": "",
            "pid": told["pid"], "python": told["python"], "host": told["host"], "joined": not told["life"],
            "ready": True, "leaving": False, "state": READY, "progress": told["steps"], "weights_held": "",
            "busy_label": told["doing"], "busy_seconds": 0.0, "statistics": statistics,
            "status_s": driver.get("status_s", 0.0), "heard_s": told["silent_s"], "silent_s": told["silent_s"]}
