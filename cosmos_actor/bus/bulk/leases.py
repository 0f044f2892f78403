"""Who still needs which block. Pure: no memory, no clock, no lock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional


@dataclass
class Lease:
    """One array in the arena. It lives exactly as long as it has a holder."""

    generation: int
    offset: int
    nbytes: int
    holders: Dict[str, int] = field(default_factory=dict)
    """Holder -> how often it holds: one hold a message that carries the reference."""


class LeaseTable:
    """A generation is given once and never again, so that a reference to what is gone can be told from a newer array.

        granted --hold--> held by n --let_go--> held by n - 1 --let_go--> gone (its lease is returned, once)
    """

    def __init__(self) -> None:
        self._leases: Dict[int, Lease] = {}
        self._last_generation = 0
        self._stale_releases = 0

    def grant(self, offset: int, nbytes: int, holder: str) -> Lease:
        """A new lease with `holder` as its first holder."""
        self._last_generation += 1
        lease = Lease(self._last_generation, offset, nbytes, {holder: 1})
        self._leases[lease.generation] = lease
        return lease

    def find(self, generation: int) -> Optional[Lease]:
        """The living lease, or None."""
        return self._leases.get(generation)

    def hold(self, generation: int, holder: str) -> bool:
        """One more hold. False: the lease is gone, nothing was changed."""
        lease = self._leases.get(generation)
        if lease is None:
            return False
        lease.holders[holder] = lease.holders.get(holder, 0) + 1
        return True

    def let_go(self, generation: int, holder: str) -> Optional[Lease]:
        """End one hold. Returns the lease when that was the last one; a hold that nobody has is counted and ignored."""
        lease = self._leases.get(generation)
        if lease is None or holder not in lease.holders:
            self._stale_releases += 1
            return None
        lease.holders[holder] -= 1
        if not lease.holders[holder]:
            del lease.holders[holder]
        return self._end_if_free(lease)

    def revoke(self, generation: int) -> Optional[Lease]:
        """End a lease whoever holds it; None when it ended already."""
        return self._leases.pop(generation, None)

    def revoke_all(self) -> List[Lease]:
        ended = list(self._leases.values())
        self._leases.clear()
        return ended

    def drop(self, holder: str) -> List[Lease]:
        """End every hold of `holder`; the leases that ended with it."""
        mine = [lease for lease in self._leases.values() if holder in lease.holders]
        for lease in mine:
            del lease.holders[holder]
        return [lease for lease in mine if self._end_if_free(lease)]

    def statistics(self) -> Dict[str, int]:
        return {
            "leases": len(self._leases),
            "holds": sum(sum(lease.holders.values()) for lease in self._leases.values()),
            "payload_bytes": sum(lease.nbytes for lease in self._leases.values()),
            "granted": self._last_generation,
            "stale_releases": self._stale_releases,
        }

    def holders(self) -> Dict[str, int]:
        """Holder -> bytes it keeps alive: the answer to who fills the budget."""
        kept: Dict[str, int] = {}
        for lease in self._leases.values():
            for holder in lease.holders:
                kept[holder] = kept.get(holder, 0) + lease.nbytes
        return kept

    def _end_if_free(self, lease: Lease) -> Optional[Lease]:
        return None if lease.holders else self._leases.pop(lease.generation)
