"""Who waits for whom in a run, and who is likely the cause. Pure: the facts of status.json in, one screen of lines out.

A node is an actor and how it stands; an edge says by whom, for what and since when it is waited for. Only an actor that
waits has edges of its own: one that computes, is silent, or is gone holds the others up, whatever it has sent.

    gone · silent · blocked · endless · starting · paused · computing     end of a chain: a likely cause
    waiting · idle                                                        a link of it; idle waits for the controller

A chain that leads back to itself is a cycle, and named: a dead-lock, or (through an idle actor) a message that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_actor.actors.watch import BLOCKED, ENDLESS, SILENT, doing, sight_of

GONE, STARTING, PAUSED, COMPUTING, WAITING, IDLE = "gone", "starting", "paused", "computing", "waiting", "idle"
SEVERITY = (GONE, SILENT, BLOCKED, ENDLESS, STARTING, PAUSED, COMPUTING, WAITING, IDLE)
"""Worst first."""
BAD = frozenset({GONE, SILENT, BLOCKED, ENDLESS})
LOST_S = 3.0
"""A cycle in which somebody waits for less is a message on its way: two actors are not seen at the same moment."""
CONTROLLER = "controller"


@dataclass(frozen=True)
class Node:
    """One actor. `text` goes on from its name, and from "NAME, which "."""

    actor: str
    role: str
    standing: str
    text: str
    for_s: float = 0.0


@dataclass(frozen=True)
class Wait:
    """`by` waits for `what`, which any of `on` is to bring (none: nobody who could is here)."""

    by: str
    on: tuple[str, ...]
    what: str
    for_s: float
    count: int = 1
    place: str = ""
    """Where it is, in words, when it is not with one actor."""


@dataclass(frozen=True)
class Graph:
    """All actors by name, and all waits, the longest first."""

    nodes: Mapping[str, Node]
    waits: Sequence[Wait]

    def next_of(self, actor: str) -> set[str]:
        return {name for wait in self.waits if wait.by == actor for name in wait.on if name in self.nodes}

    def behind(self, actor: str) -> set[str]:
        """Whom it waits for, directly or through others."""
        found: set[str] = set()
        ends = [actor]
        while ends:
            new = self.next_of(ends.pop()) - found
            found |= new
            ends.extend(new)
        return found

    def waiters_of(self, actor: str) -> list[str]:
        """Who waits for it, directly or through others."""
        return sorted(name for name in self.nodes if name != actor and actor in self.behind(name))

    def cycles(self) -> list[list[str]]:
        """Actors that wait for each other, as the way from the first back to it; shortest through its first name."""
        found: list[list[str]] = []
        for start in sorted(self.nodes):
            way = self._way_back(start)
            if way and not any(set(way) <= set(other) for other in found):
                found.append(way)
        return found

    def causes(self) -> list[Node]:
        """Those who wait for nobody: bad ones, and ones that others wait for; the worst and longest first."""
        found = [node for node in self.nodes.values() if node.standing not in (WAITING, IDLE)
                 and (node.standing in BAD or self.waiters_of(node.actor))]
        return sorted(found, key=lambda node: (
            SEVERITY.index(node.standing), not self.waiters_of(node.actor), -node.for_s, node.actor))

    def _way_back(self, start: str) -> list[str]:
        """The shortest way from `start` to itself in which nobody has waited less than LOST_S; empty without one."""
        ways, seen = [[start]], set[str]()
        for way in ways:
            for name in sorted(self._long_next(way[-1])):
                if name == start:
                    return [*way, start]
                if name not in seen:
                    seen.add(name)
                    ways.append([*way, name])
        return []

    def _long_next(self, actor: str) -> set[str]:
        return {name for wait in self.waits if wait.by == actor and wait.for_s >= LOST_S for name in wait.on
                if name in self.nodes}


def graph_of(facts: Mapping[str, Any]) -> Graph:
    """The graph of what the head of a run knows (`Sentinel.facts`)."""
    members = {member["actor"]: member for member in facts.get("members", [])}
    children = {child["actor"]: child for child in facts.get("children", [])}
    stuck_s = float(facts.get("stuck_s", 2.5))
    nodes = {actor: _standing(actor, members.get(actor), children.get(actor), stuck_s)
             for actor in sorted({*members, *children})}
    waits = [wait for actor, node in nodes.items() if node.standing in (WAITING, IDLE)
             for wait in _waits(node, members[actor], nodes)]
    return Graph(nodes, sorted(waits, key=lambda wait: -wait.for_s))


def lines(graph: Graph) -> list[str]:
    """The screen: likely causes, cycles, then who waits for whom; if nobody does, how each stands."""
    causes = [f"  {node.actor} {node.text}{_waited_for(graph, node)}" for node in graph.causes()]
    cycles = [f"  {_cycle_text(graph, cycle)}" for cycle in graph.cycles()]
    waiting = [f"  {line}" for line in _waiting_lines(graph)]
    shown = []
    for title, part in (("likely cause", causes), ("cycle", cycles), ("who waits", waiting)):
        shown += [title, *part] if part else []
    return shown or ["nobody waits", *(f"  {node.actor} {node.text}" for node in graph.nodes.values())]


def one_line(graph: Graph) -> str:
    """The same in one line, for an event: the longest wait and the first cause, or the first cycle."""
    cycles, causes = graph.cycles(), graph.causes()
    if cycles and not any(node.standing in BAD for node in causes):
        return _cycle_text(graph, cycles[0])
    waiting = next((line for line in _waiting_lines(graph) if graph.nodes[line.split()[0]].standing == WAITING), "")
    cause = f"{causes[0].actor} {causes[0].text}" if causes else ""
    return "; ".join(part for part in (cause, waiting) if part) or "nobody waits for anybody"


# ---- how one actor stands


def _standing(actor: str, member: Mapping[str, Any] | None, child: Mapping[str, Any] | None, stuck_s: float) -> Node:
    role = str((member or child or {}).get("role", ""))
    if member is None:
        assert child is not None
        return Node(actor, role, *_absent(child))
    return Node(actor, role, *_present(member, member.get("statistics") or {}, stuck_s))


def _absent(child: Mapping[str, Any]) -> tuple[str, str, float]:
    """A process that is no member: not started, not announced yet, or lost by the head."""
    state, lost, process = child.get("state"), child.get("lost") or "", _process(child)
    if state == "starting":
        return STARTING, f"is being started{process}", 0.0
    if state in ("ready", "stopping", "killed"):
        return GONE, f"is lost to the run: {lost or 'it left'}{process}", 0.0
    return GONE, f"does not run{': ' + lost if lost else ''}; it is {state}", 0.0


def _present(member: Mapping[str, Any], told: Mapping[str, Any], stuck_s: float) -> tuple[str, str, float]:
    sight, label, computing = sight_of(member), doing(member), told.get("computing")
    if sight.paused:
        pause = told["pause"]
        return PAUSED, f"is in a declared pause for {pause['what']}, {_s(pause['left_s'])} left", 0.0
    if sight.silent_s >= stuck_s:
        text = f"gave no heartbeat for {_s(sight.silent_s)}, last seen at {label}{_process(member)}"
        return SILENT, text, sight.silent_s
    if computing and sight.blocked:
        return BLOCKED, (f"is blocked in {label} for {_s(computing['still_s'])}: no progress, and no use of a CPU"
                         f"{_for_whom(told)}"), computing["still_s"]
    if member.get("stuck") == ENDLESS and computing:
        return ENDLESS, (f"computes {label} without progress for {_s(computing['still_s'])}{_for_whom(told)}"
                         ), computing["still_s"]
    if member.get("state") != "ready":
        text = f"computes {label} for {_s(computing['for_s'])}" if computing else f"is {label}"
        return STARTING, f"is not ready: it {text}", float(computing["for_s"]) if computing else 0.0
    if computing:
        return COMPUTING, (f"computes {label} for {_s(computing['for_s'])}, last progress "
                           f"{_s(computing['still_s'])} ago{_for_whom(told)}"), computing["for_s"]
    return _without_compute(member, told)


def _without_compute(member: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[str, str, float]:
    waits = [*told.get("waits", []), *told.get("questions", [])]
    if waits or told.get("messages") or _foreign(told):
        for_s = max((float(wait["for_s"]) for wait in (*waits, *told.get("messages", []))), default=0.0)
        purpose = next((f" for {wait['what']}" for wait in told.get("waits", []) if not wait["on"]), "")
        return WAITING, f"waits {_s(for_s)}{purpose}{_for_whom(told)}", for_s
    if member.get("role") == CONTROLLER:
        return COMPUTING, "waits for no actor: its recipe computes, or sits in a debugger", 0.0
    idle_s, holds = float(told.get("idle_s", 0.0)), told.get("holds")
    if holds:
        senders = ", ".join(f"{count} of {name}" for name, count in sorted(holds.items()))
        return WAITING, f"waits {_s(idle_s)} for the arrays of messages that have come ({senders})", idle_s
    return IDLE, f"has nothing to do for {_s(idle_s)}", idle_s


def _foreign(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Messages of ours at peers, other than events: nobody waits for those."""
    return [entry for entry in told.get("under_way", []) if entry["channel"] != "event"]


def _for_whom(told: Mapping[str, Any]) -> str:
    messages = told.get("messages") or []
    return f" ({messages[0]['what']} of {messages[0]['of']})" if messages else ""


def _process(facts: Mapping[str, Any]) -> str:
    state, pid = facts.get("process"), facts.get("pid")
    return f"; process {pid} is {state}" if state and pid else ""


# ---- for whom it waits


def _waits(node: Node, member: Mapping[str, Any], nodes: Mapping[str, Node]) -> Iterator[Wait]:
    told = member.get("statistics") or {}
    if node.standing == IDLE:
        controllers = tuple(other.actor for other in nodes.values() if other.role == CONTROLLER)
        yield Wait(node.actor, controllers, "work", node.for_s)
        return
    questions = told.get("questions", [])
    for question in questions:
        at, role = question["at"], question["role"]
        on = (at,) if at else tuple(other.actor for other in nodes.values() if other.role == role)
        yield Wait(node.actor, on, question["what"], question["for_s"], question.get("count", 1),
                   "" if at else f"no actor of role {role} is free")
    for wait in told.get("waits", []):
        on = tuple(other.actor for other in nodes.values() if wait["on"] in (other.actor, other.role) and wait["on"])
        if on:
            yield Wait(node.actor, on, wait["what"], wait["for_s"])
    if not questions:
        for entry in _foreign(told):
            broken = "" if entry.get("up", True) else " (no wire to it now)"
            yield Wait(node.actor, (entry["on"],), f"{entry['message']}{broken}", entry["for_s"], entry["count"])
        for sender, count in sorted((told.get("holds") or {}).items()):
            if not told.get("messages"):
                yield Wait(node.actor, (sender,), "the arrays of its messages", node.for_s, count)


# ---- words


def _waiting_lines(graph: Graph) -> Iterator[str]:
    """One line for each actor that waits; those with nothing to do last, together."""
    waiting = sorted((node for node in graph.nodes.values() if node.standing == WAITING), key=lambda node: -node.for_s)
    for node in waiting:
        waits = [wait for wait in graph.waits if wait.by == node.actor]
        total = sum(wait.count for wait in waits)
        parts = "; ".join(_wait_text(graph, node, wait, total) for wait in waits)
        yield f"{node.actor} {node.text}" + (f": {parts}" if parts else "")
    idle = [f"{node.actor} ({_s(node.for_s)})" for node in graph.nodes.values() if node.standing == IDLE]
    if idle:
        yield f"nothing to do: {', '.join(idle)}"


def _wait_text(graph: Graph, node: Node, wait: Wait, total: int) -> str:
    """What and where; what the node's own text has said already is left out."""
    share = f"{wait.count} of {total}: " if total > 1 else ""
    what = "" if node.text.endswith(f" for {wait.what}") else f"{wait.what} "
    if wait.place:
        return f"{share}{what}({wait.place})" if what else f"{share}{wait.place}"
    if len(wait.on) != 1:
        return f"{share}{what}at {' or '.join(wait.on)}"
    other = graph.nodes.get(wait.on[0])
    which = f", which {other.text.partition(';')[0]}" if other is not None and other.standing != WAITING else ""
    return f"{share}{what}at {wait.on[0]} for {_s(wait.for_s)}{which}"


def _waited_for(graph: Graph, node: Node) -> str:
    waiters = graph.waiters_of(node.actor)
    return f" - waited for by {', '.join(waiters)}" if waiters else ""


def _cycle_text(graph: Graph, cycle: Sequence[str]) -> str:
    steps = [next(wait for wait in graph.waits if wait.by == by and on in wait.on)
             for by, on in zip(cycle, cycle[1:], strict=False)]
    told = ", ".join(f"{wait.by} waits {_s(wait.for_s)} for {wait.what} of {on}"
                     for wait, on in zip(steps, cycle[1:], strict=True))
    idle = [name for name in cycle[:-1] if graph.nodes[name].standing == IDLE]
    lost = f": {idle[0]} has nothing in hand, so what was sent to it is on its way or lost" if idle else ""
    return f"{' -> '.join(cycle)} ({told}){lost}"


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
