"""Who is stuck, and whether the job as a whole is. Pure: what is seen of the actors and the time in, findings out.

    silent    no heartbeat of the process: it is stopped, or something holds its interpreter lock
    blocked   its loop turns, but what it computes makes no progress and uses no CPU
    endless   what it computes makes no progress for `endless_s`; only a computation that ticks can be told from this

Guarantees: an actor in a declared pause is never stuck, and one that is still being set up (imports hold the
interpreter lock) only after a long silence; each finding is given once until its actor gets on; only an endless or
long blocked one is ever to be killed, and only where that is asked for.
(That silence kills is the supervisor's `heartbeat_s`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_actor.actors.messages import READY

SETUP_SHARE = 3.0
"""How much longer an actor that is being set up may be silent."""
OVERSLEPT_S = 1.0
"""A look that comes so much later than the last one was not looking in between, and the time does not count."""
SILENT, BLOCKED, ENDLESS = "silent", "blocked", "endless"


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is known of one life of an actor at one time. All times in seconds."""

    actor: str
    incarnation: str
    ready: bool = True
    progress: int = 0
    silent_s: float = 0.0
    # without any word, declared pauses left out
    doing: str = ""
    still_s: float = 0.0
    # how long what it does has made no progress, declared pauses left out
    blocked: bool = False
    # its own loop says that this takes no CPU either
    paused: bool = False


def sight_of(member: Mapping[str, Any]) -> Sight:
    """What a head's entry about a member (`Head.members`) says. Its declared pause runs out also without a word."""
    told = member.get("statistics") or {}
    computing = told.get("computing") or {}
    pause_left_s = (told.get("pause") or {}).get("left_s", 0.0) - member.get("status_s", 0.0)
    return Sight(
        actor=member["actor"], incarnation=member["incarnation"], ready=member.get("state") == READY,
        progress=int(member.get("progress", 0)), silent_s=member.get("silent_s", 0.0), doing=doing(member),
        still_s=computing.get("still_s", 0.0), blocked=bool(told.get("blocked")), paused=pause_left_s > 0)


def doing(member: Mapping[str, Any]) -> str:
    """What it computed when it was last heard, or else how it was."""
    computing = (member.get("statistics") or {}).get("computing")
    return str(computing["what"] if computing else member.get("state") or "dialling")


@dataclass(frozen=True)
class Stuck:
    """The actor is stuck in this way from now on; `reason` is one line without its name."""

    actor: str
    incarnation: str
    kind: str
    reason: str


@dataclass(frozen=True)
class GoesOn:
    """It was stuck for `after_s`, as far as was seen."""

    actor: str
    incarnation: str
    after_s: float


@dataclass(frozen=True)
class KillStuck:
    """It is to be killed, for this reason."""

    actor: str
    incarnation: str
    reason: str


@dataclass(frozen=True)
class Standstill:
    """Nobody has got anything done for `for_s`."""

    for_s: float


Finding = Stuck | GoesOn | KillStuck | Standstill


class Watch:
    """See the module. `stuck` has the open finding of each stuck actor, by name."""

    def __init__(self, now: float, *, stuck_s: float, endless_s: float, no_progress_s: float, kill: bool) -> None:
        self.stuck: dict[str, Stuck] = {}
        self._stuck_s, self._endless_s, self._no_progress_s, self._kill = stuck_s, endless_s, no_progress_s, kill
        self._since: dict[str, float] = {}
        self._condemned: set[str] = set()
        self._progress: dict[str, int] = {}
        self._moved_at = self._looked_at = now
        self._stands = False

    def look(self, now: float, sights: Sequence[Sight]) -> list[Finding]:
        """Everybody who is here, as they are now. Call it several times in `stuck_s`."""
        if now - self._looked_at > OVERSLEPT_S:
            self._moved_at += now - self._looked_at
        self._looked_at = now
        self._forget_absent({sight.actor: sight.incarnation for sight in sights})
        findings = [finding for sight in sights for finding in self._one(now, sight)]
        return findings + self._all(now, sights)

    def silent_for(self, seconds: float, now: float) -> set[str]:
        """Who is silent for at least so long since that was found."""
        return {actor for actor, found in self.stuck.items()
                if found.kind == SILENT and now - self._since[actor] >= seconds}

    def still_for_s(self, now: float) -> float:
        """How long nobody has got anything done."""
        return now - self._moved_at

    def _one(self, now: float, sight: Sight) -> list[Finding]:
        known, kind = self.stuck.get(sight.actor), self._kind(sight)
        if kind is None:
            return [] if known is None else [self._goes_on(now, sight)]
        findings: list[Finding] = []
        if known is None or known.kind != kind:
            self._since.setdefault(sight.actor, now)
            self.stuck[sight.actor] = Stuck(sight.actor, sight.incarnation, kind, self._reason(kind, sight))
            findings.append(self.stuck[sight.actor])
        hopeless = self._kill and kind != SILENT and sight.still_s >= self._endless_s
        if hopeless and sight.incarnation not in self._condemned:
            self._condemned.add(sight.incarnation)
            findings.append(KillStuck(sight.actor, sight.incarnation, f"stuck: {self._reason(kind, sight)}"))
        return findings

    def _kind(self, sight: Sight) -> str | None:
        if sight.paused:
            return None
        if sight.silent_s >= self._stuck_s * (1.0 if sight.ready else SETUP_SHARE):
            return SILENT
        if not sight.ready:
            return None
        if sight.blocked:
            return BLOCKED
        return ENDLESS if sight.still_s >= self._endless_s else None

    def _reason(self, kind: str, sight: Sight) -> str:
        if kind == SILENT:
            return f"no heartbeat for {sight.silent_s:.1f} s, last seen at {sight.doing}"
        if kind == BLOCKED:
            return f"{sight.doing} makes no progress for {sight.still_s:.1f} s and uses no CPU: it waits for something"
        return f"{sight.doing} makes no progress for {sight.still_s:.1f} s, though it uses a CPU"

    def _goes_on(self, now: float, sight: Sight) -> GoesOn:
        del self.stuck[sight.actor]
        return GoesOn(sight.actor, sight.incarnation, now - self._since.pop(sight.actor))

    def _forget_absent(self, present: dict[str, str]) -> None:
        for actor, finding in list(self.stuck.items()):
            if present.get(actor) != finding.incarnation:
                del self.stuck[actor], self._since[actor]
                self._condemned.discard(finding.incarnation)

    def _all(self, now: float, sights: Sequence[Sight]) -> list[Finding]:
        progress = {sight.incarnation: sight.progress for sight in sights}
        if progress != self._progress or any(sight.paused for sight in sights):
            self._progress, self._moved_at, self._stands = progress, now, False
        if self._stands or now - self._moved_at < self._no_progress_s:
            return []
        self._stands = True
        return [Standstill(now - self._moved_at)]
