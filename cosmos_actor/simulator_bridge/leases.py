"""Who runs which work unit, until when, and what has become of each. Pure: events and the time come in.

    waiting ──take──> leased ──done──> done
       ^                 |──failed, expired, holder lost──> waiting again as the next attempt, or given up
       '──given back─────'

Invariants: a unit has at most one lease; it becomes `done` at most once, by the lease that is current then; an error of
a simulator is never `done`. A group is done when all of its units are, or dropped whole.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Set

from .contract import WorkUnit


class UnknownUnit(Exception):
    """A unit was added twice, or a lease is asked about that this table never gave."""


@dataclass(frozen=True)
class Lease:
    """A unit in a holder's hands."""

    number: int
    unit: WorkUnit
    group: str
    holder: str
    expires: float
    """Clock of whoever owns the table, seconds."""


class Verdict(NamedTuple):
    """What a failure led to."""

    again: bool
    """The unit waits for its next attempt."""
    dropped: List[str]
    """Units that will not be run (any more): this one, and the rest of its group."""


class LeaseTable:
    """See the module. `attempts`: how often a unit is tried; `lease_s`: how long a lease holds without a renewal."""

    def __init__(self, *, attempts: int, lease_s: float) -> None:
        self._attempts, self._lease_s = attempts, lease_s
        self._waiting: Deque[str] = deque()
        self._units: Dict[str, WorkUnit] = {}
        """Of those that wait or are leased."""
        self._groups: Dict[str, Set[str]] = {}
        """Group -> its units that are not done."""
        self._group_of: Dict[str, str] = {}
        self._leases: Dict[int, Lease] = {}
        self._next = 0
        self._counts: Counter = Counter()  # type: ignore[type-arg]
        self._failures: Counter = Counter()  # type: ignore[type-arg]

    def add(self, unit: WorkUnit, *, group: str = "", first: bool = False) -> None:
        """A unit to run; `first`: before those that wait. Raises UnknownUnit for one that is here already."""
        if unit.unit_id in self._units:
            raise UnknownUnit("unit {} is in the table already".format(unit.unit_id))
        self._units[unit.unit_id] = unit
        if group:
            self._group_of[unit.unit_id] = group
            self._groups.setdefault(group, set()).add(unit.unit_id)
        self._wait(unit.unit_id, first=first)
        self._counts["added"] += 1

    def take(self, holder: str, now: float) -> Optional[Lease]:
        """The unit that waits longest, those that failed before first; None when none waits."""
        if not self._waiting:
            return None
        unit_id = self._waiting.popleft()
        lease = Lease(self._next, self._units[unit_id], self._group_of.get(unit_id, ""), holder, now + self._lease_s)
        self._next += 1
        self._leases[lease.number] = lease
        return lease

    def holds(self, lease: Lease) -> bool:
        """Whether it is current. What an old one brings does not count."""
        return lease.number in self._leases

    def renew(self, lease: Lease, now: float) -> bool:
        """Its holder gets on. False for one that is not current any more."""
        if not self.holds(lease):
            return False
        self._leases[lease.number] = replace(self._leases[lease.number], expires=now + self._lease_s)
        return True

    def done(self, lease: Lease) -> bool:
        """Its episode came to its end. True exactly once for each unit; then it counts."""
        if not self._forget(lease):
            return False
        self._counts["done"] += 1
        self._leave(lease.unit.unit_id)
        return True

    def failed(self, lease: Lease, kind: str) -> Verdict:
        """The attempt came to nothing for a reason that is no word about the policy."""
        if not self._forget(lease):
            return Verdict(False, [])
        self._failures[kind] += 1
        unit = lease.unit
        if unit.attempt + 1 < self._attempts:
            self._units[unit.unit_id] = replace(unit, attempt=unit.attempt + 1)
            self._wait(unit.unit_id, first=True)
            self._counts["again"] += 1
            return Verdict(True, [])
        self._counts["given_up"] += 1
        return Verdict(False, self._drop_group_of(unit.unit_id))

    def give_back(self, lease: Lease) -> None:
        """Nobody's fault, and no attempt: it is run again from its beginning."""
        if self._forget(lease):
            self._wait(lease.unit.unit_id, first=True)
            self._counts["given_back"] += 1

    def abandon(self, lease: Lease) -> None:
        """Nobody wants it any more."""
        if self._forget(lease):
            self._counts["abandoned"] += 1
            self._leave(lease.unit.unit_id)

    def expired(self, now: float) -> List[Lease]:
        """Current leases whose time is over; `failed` is to follow for each."""
        return [lease for lease in self._leases.values() if lease.expires <= now]

    def of_holder(self, holder: str) -> List[Lease]:
        return [lease for lease in self._leases.values() if lease.holder == holder]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def statistics(self) -> Dict[str, Any]:
        """added = done + given_up + dropped + abandoned + waiting + leased, always."""
        names = ("added", "done", "given_up", "dropped", "abandoned", "again", "given_back")
        return {**{name: self._counts[name] for name in names}, "waiting": len(self._waiting),
                "leased": len(self._leases), "failures": dict(self._failures)}

    def _wait(self, unit_id: str, *, first: bool) -> None:
        if first:
            self._waiting.appendleft(unit_id)
        else:
            self._waiting.append(unit_id)

    def _forget(self, lease: Lease) -> bool:
        return self._leases.pop(lease.number, None) is not None

    def _leave(self, unit_id: str) -> None:
        del self._units[unit_id]
        group = self._group_of.pop(unit_id, "")
        if group:
            self._groups[group].discard(unit_id)
            if not self._groups[group]:
                del self._groups[group]

    def _drop_group_of(self, unit_id: str) -> List[str]:
        others = self._groups.get(self._group_of.get(unit_id, ""), set()) - {unit_id}
        for other in sorted(others):
            if other in self._waiting:
                self._waiting.remove(other)
            for lease in [lease for lease in self._leases.values() if lease.unit.unit_id == other]:
                del self._leases[lease.number]
            self._counts["dropped"] += 1
            self._leave(other)
        self._leave(unit_id)
        return [unit_id, *sorted(others)]
