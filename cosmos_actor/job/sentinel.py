"""Watches the actors of a run from beside its head: who is stuck is reported, and a standstill leaves its evidence.

Events in events.jsonl: stuck (kind, reason) and goes_on (after_s), about one life of an actor · standstill (for_s, why,
stacks). `more` is what status.json has on top of the head's members, for `cosmos-actor why`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from cosmos_actor.actors import stacks
from cosmos_actor.actors.child_state import State
from cosmos_actor.actors.head import Head
from cosmos_actor.actors.processes import process_state, with_processes
from cosmos_actor.actors.role_names import REGISTRY
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.actors.wait_graph import graph_of, one_line
from cosmos_actor.actors.watch import SILENT, Finding, GoesOn, KillStuck, Standstill, Stuck, Watch, sight_of
from cosmos_actor.simulator_bridge.messages import SIMULATOR

LOOK_S = 0.25
"""Between two looks. Rarer, and what is stuck is not found within 3 s."""
OVERSLEPT_S = 1.0
"""A look that is so late means that this process slept: what the others said meanwhile is to be read first."""
DUMP_S = 0.5
"""How long a process that is asked for its stacks may take to write them, before the report names the file."""

Children = Callable[[], list[dict[str, Any]]]
DumpSupervisor = Callable[[str], Awaitable[bool]]


class Sentinel:
    """Shell around `Watch`: looks, reports, asks for stacks. It decides nothing."""

    def __init__(self, head: Head, directory: RunPaths, children: Children, limits: Any,
                 kill: Callable[[str, str, str], None], events: Any,
                 dump_supervisor: DumpSupervisor) -> None:
        """`limits`: the section [supervisor]. `kill(actor, incarnation, reason)` ends that life, if it is a child's;
        `events` has `append(record)`. `dump_supervisor(title)` has the supervisor write its own stacks and says whether
        it did."""
        self._head, self._directory, self._children, self._kill = head, directory, children, kill
        self._stuck_s = limits.stuck_s
        self._watch = Watch(time.monotonic(), stuck_s=limits.stuck_s, endless_s=limits.heartbeat_s,
                            no_progress_s=limits.no_progress_s, kill=limits.on_stuck == "kill")
        self._events = events
        self._dump_supervisor = dump_supervisor
        self._looked_at = time.monotonic()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            now = time.monotonic()
            if now - self._looked_at < OVERSLEPT_S:
                for finding in self._watch.look(now, [sight_of(member) for member in self._head.members()]):
                    await self._report(finding)
            self._looked_at = time.monotonic()
            await asyncio.sleep(LOOK_S)

    def mute_role(self, seconds: float) -> str:
        """A role all of whose actors are silent for at least so long, or lost to the run; simulators also where one is
        waited for so long and none is there. Empty if there is none."""
        silent = self._watch.silent_for(seconds, time.monotonic())
        members = self._head.members()
        answering = {member["role"] for member in members if member["actor"] not in silent}
        running = {child["role"] for child in self._actors() if child["state"] == State.READY.value}
        awaited = {wait["on"] for member in members for wait in (member.get("statistics") or {}).get("waits", [])
                   if wait["for_s"] >= seconds}
        here = {member["role"] for member in members}
        return min((running | here | (awaited & {SIMULATOR})) - answering, default="")

    def facts(self) -> dict[str, Any]:
        """All that `wait_graph.graph_of` wants to know."""
        return {"members": [{**member, "stuck": self._kind(member["actor"])} for member in self._head.members()],
                **self.more()}

    def more(self) -> dict[str, Any]:
        """What the head does not know by itself: processes, who is stuck, and for how long nothing has got done."""
        departed = self._head.registry.membership().departed
        children = [{**child, "lost": departed.get(child["incarnation"] or "", "")} for child in self._actors()]
        return {"children": children, "stuck_s": self._stuck_s,
                "stuck": {actor: {"kind": found.kind, "reason": found.reason}
                          for actor, found in self._watch.stuck.items()},
                "still_s": round(self._watch.still_for_s(time.monotonic()), 2)}

    def _actors(self) -> list[dict[str, Any]]:
        """The children that should be members: all but the process in which this runs."""
        return [child for child in self._children() if child["role"] != REGISTRY]

    def _kind(self, actor: str) -> str:
        found = self._watch.stuck.get(actor)
        return "" if found is None else found.kind

    async def _report(self, finding: Finding) -> None:
        match finding:
            case Stuck(actor, incarnation, kind, reason):
                self._event("stuck", actor=actor, incarnation=incarnation, kind=kind,
                            reason=reason + (self._process_of(actor) if kind == SILENT else ""))
            case GoesOn(actor, incarnation, after_s):
                self._event("goes_on", actor=actor, incarnation=incarnation, after_s=round(after_s, 2))
            case KillStuck(actor, incarnation, reason):
                self._kill(actor, incarnation, reason)
            case Standstill(for_s):
                why = one_line(graph_of(with_processes(self.facts())))
                files = await self._dump(f"nothing got done for {for_s:.0f} s: {why}")
                self._event("standstill", for_s=round(for_s, 1), why=why, stacks=files)

    async def _dump(self, reason: str) -> list[str]:
        """The stacks of every process of this host, each in a file of its own; the files, relative to the run."""
        title = f"\n==== {time.strftime('%Y-%m-%d %H:%M:%S')} {reason} ====\n"
        alive = {child["incarnation"]: self._directory.stacks(child["actor"], child["incarnation"])
                 for child in self._children() if child["incarnation"] and child["pid"]}
        own = alive.pop(self._head.bus.identity.incarnation, None)
        supervisor_did = await self._dump_supervisor(title)
        try:
            for file in alive.values():
                _append(file, title)
            if own is not None:
                stacks.own(own, title)
        except OSError:
            return []  # a full disk may well be why nothing gets done
        for incarnation in alive:
            await asyncio.to_thread(stacks.ask, incarnation)
        await asyncio.sleep(DUMP_S)
        files = [*([self._directory.supervisor_stacks] if supervisor_did else []), *([] if own is None else [own]),
                 *alive.values()]
        return [str(file.relative_to(self._directory.root)) for file in files]

    def _process_of(self, actor: str) -> str:
        member = self._head.registry.member(actor)
        if member is None or member.host != socket.gethostname():
            return ""
        return f"; process {member.pid} is {process_state(member.pid)}"

    def _event(self, name: str, **fields: Any) -> None:
        self._events.append({"time": time.time(), "event": name, **fields})


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
