"""Ends of a publisher, a subscriber or a relay between two chunks of a version, one after the other in one world.

A point is who ends, how (SIGKILL, or SIGSTOP until the others are done), and before which of its own chunks. After
each one a version is published that everybody has to take.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.weight_plane.fan_out.world import Player, World

ROLLOUTS = 4
DEADLINE_S = 10.0
SLACK_S = 2.0
"""Beyond a deadline, for a machine with other things to do."""
MIB_OF_A_VERSION, PATIENCE_S = 12, 1.0
WORLD: dict[str, Any] = {"mib": MIB_OF_A_VERSION, "deadline_s": DEADLINE_S, "patience_s": PATIENCE_S, "lost_s": 1.0}
PUBLISHER, SUBSCRIBER, RELAY = "publisher", "subscriber", "relay"


@dataclass(frozen=True)
class Point:
    who: str
    victim: str
    chunk: int
    """It ends before it sends (publisher, relay) or has seen (subscriber) its chunk of this number, from 0."""
    signal: int


@dataclass
class Outcome:
    point: Point
    reached: bool
    """Otherwise it had no such chunk, and ended after its last one."""
    took: int
    """Others that took the version."""
    kept: int
    """Others that kept the one before, and said so."""
    seconds: float
    """The longest pull of the others."""
    next_s: float
    """Until all had the next version, with whoever was started anew."""
    wrong: list[str]
    """Broken promises."""


def points(seed: int) -> Iterator[Point]:
    """Publishers, subscribers and relays in turn, without an end; every eighth one is stopped instead of killed."""
    chance = random.Random(seed)
    most = {PUBLISHER: MIB_OF_A_VERSION, SUBSCRIBER: MIB_OF_A_VERSION, RELAY: MIB_OF_A_VERSION // 2}
    for number in itertools.count():
        who = (PUBLISHER, SUBSCRIBER, RELAY)[number % 3]
        victim = "policy-0" if who == PUBLISHER else f"rollout-{chance.randrange(ROLLOUTS)}"
        how = signal.SIGSTOP if number % 8 == 7 else signal.SIGKILL
        yield Point(who, victim, chance.randrange(most[who]), int(how))


def begin(world: World) -> str:
    """Rollouts that all hold a first version; its digest."""
    for number in range(ROLLOUTS):
        world.start_rollout(f"rollout-{number}")
    first = world.publish()
    world.everybody_takes(first, DEADLINE_S + SLACK_S)
    return first


def end_one(world: World, point: Point, before: str) -> tuple[Outcome, str]:
    """What came of it, and the digest of the version that all hold then. `before`: of the one that all hold now."""
    victim = world.policy if point.who == PUBLISHER else world.rollouts[point.victim]
    victim.say(arm={"at": "received" if point.who == SUBSCRIBER else "sent", "chunk": point.chunk,
                    "signal": point.signal})
    victim.hear("armed", 5.0)
    digest = world.publish()
    others = set(world.rollouts) - {point.victim}
    reports = world.reports(others, DEADLINE_S + SLACK_S)
    reached = _has_ended(victim, point)
    _bring_back(world, victim, point)
    took = [actor for actor, report in reports.items() if report["digest"] == digest and not report["problem"]]
    kept = [actor for actor, report in reports.items() if report["digest"] == before and report["problem"]]
    wrong = [f"{actor} holds version {world.digests.get(report['digest'], 'UNKNOWN')}: {report['problem'] or 'no word'}"
             for actor, report in reports.items() if actor not in (*took, *kept)]
    if kept and point.who != PUBLISHER:
        wrong.append(f"{kept} did not take a version whose publisher lives: {reports[kept[0]]['problem']}")
    seconds = max(report["seconds"] for report in reports.values())
    if seconds > DEADLINE_S + SLACK_S:
        wrong.append(f"a pull took {seconds:.1f} s")
    begun = time.monotonic()
    newest = world.publish()
    world.everybody_takes(newest, 3 * DEADLINE_S)
    return Outcome(point, reached, len(took), len(kept), seconds, time.monotonic() - begun, wrong), newest


def _has_ended(victim: Player, point: Point) -> bool:
    """Whether it came to the chunk; if not, it ends here."""
    if point.signal == signal.SIGKILL:
        try:
            victim.process.wait(0.2)
            return True
        except subprocess.TimeoutExpired:
            victim.kill()
            return False
    with open(f"/proc/{victim.process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def _bring_back(world: World, victim: Player, point: Point) -> None:
    if point.signal == signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)
        victim.say(arm={})
    elif point.who == PUBLISHER:
        world.start_policy()
    else:
        world.start_rollout(point.victim)


def end_all(
    world: World, points: Iterable[Point], reach: int, told: Callable[[str], None] = lambda line: None
) -> list[Outcome]:
    """One after the other, until so many victims have come to their chunk, or there are no more points."""
    digest, outcomes, reached = begin(world), [], 0
    for point in points:
        if reached == reach:
            break
        outcome, digest = end_one(world, point, digest)
        outcomes.append(outcome)
        reached += outcome.reached
        told(f"{reached:4} {point.who:10} {point.victim:10} {signal.Signals(point.signal).name} before chunk "
             f"{point.chunk:2}{'' if outcome.reached else ' (had no such chunk)'}: {outcome.took} took it, "
             f"{outcome.kept} kept the one before, {outcome.seconds:.2f} s; next {outcome.next_s:.2f} s"
             + "".join(f"\n     BROKEN: {line}" for line in outcome.wrong))
    return outcomes


def figures(outcomes: list[Outcome]) -> dict[str, Any]:
    """Everything, for people and for files."""
    by_kind: dict[str, Any] = {}
    for kind in sorted({_kind(outcome.point) for outcome in outcomes}):
        some = [outcome for outcome in outcomes if _kind(outcome.point) == kind]
        by_kind[kind] = {
            "points": len(some), "reached": sum(outcome.reached for outcome in some),
            "took": sum(outcome.took for outcome in some), "kept": sum(outcome.kept for outcome in some),
            "longest_s": round(max(outcome.seconds for outcome in some), 2),
            "longest_next_s": round(max(outcome.next_s for outcome in some), 2)}
    return {"points": len(outcomes), "by_kind": by_kind, "deadline_s": DEADLINE_S, "patience_s": PATIENCE_S,
            "places": Counter(f"{outcome.point.who} {outcome.point.chunk}" for outcome in outcomes if outcome.reached),
            "broken": [line for outcome in outcomes for line in outcome.wrong]}


def _kind(point: Point) -> str:
    return f"{point.who} {'stopped' if point.signal == signal.SIGSTOP else 'killed'}"
