"""Arrays of others that are used here or were passed on: when may they be given back? Pure.

    owner --lends--> controller --lends--> consumer          every one gives back to the one it got the reference from,
          <-------------------  <---------                   and only when nothing here and nobody further on uses it

So the owner knows its direct peers only, and a consumer needs no link to the owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Tuple

Key = Tuple[bytes, int]
"""(arena, generation): one array, everywhere."""

Returns = List[Tuple[str, Key, int]]
"""(lender, array, how many loans of it end)"""


@dataclass
class _Loan:
    used_here: int = 0
    owed: Dict[str, int] = field(default_factory=dict)
    """Lender -> loans."""
    lent: Dict[str, int] = field(default_factory=dict)
    """Taker -> loans."""


class LoanTable:
    """An array is owed to its lenders for as long as it is used here or lent on, and is then given back once."""

    def __init__(self) -> None:
        self._loans: Dict[Key, _Loan] = {}
        self._counts = {"borrowed": 0, "lent": 0, "stale_returns": 0, "orphaned": 0}

    def borrow(self, key: Key, lender: str) -> None:
        """A message of `lender` brought it; it is used here once more."""
        loan = self._loans.setdefault(key, _Loan())
        loan.used_here += 1
        loan.owed[lender] = loan.owed.get(lender, 0) + 1
        self._counts["borrowed"] += 1

    def lend(self, key: Key, taker: str) -> bool:
        """A message to `taker` takes it along. False, and no effect: it is not borrowed (any more)."""
        loan = self._loans.get(key)
        if loan is None:
            return False
        loan.lent[taker] = loan.lent.get(taker, 0) + 1
        self._counts["lent"] += 1
        return True

    def use_ended(self, key: Key) -> Returns:
        """One use here is over; what is to be given back now."""
        loan = self._loans.get(key)
        if loan is None:
            return []
        loan.used_here -= 1
        return self._settle(key, loan)

    def given_back(self, key: Key, taker: str, count: int = 1) -> Returns:
        """`taker` gave loans back; what is to be given back in turn. Loans it does not have are counted and ignored."""
        loan = self._loans.get(key)
        if loan is None or not 0 < count <= loan.lent.get(taker, 0):
            self._counts["stale_returns"] += 1
            return []
        loan.lent[taker] -= count
        if not loan.lent[taker]:
            del loan.lent[taker]
        return self._settle(key, loan)

    def peer_lost(self, peer: str) -> Tuple[Returns, int]:
        """`peer` takes and gives nothing any more. (what is to be given back, arrays orphaned)

        Orphaned: only `peer` had lent it, and it is used here.
        """
        returns: Returns = []
        orphans = 0
        for key, loan in list(self._loans.items()):
            loan.lent.pop(peer, None)
            orphans += bool(loan.owed.pop(peer, None) and loan.used_here and not loan.owed)
            returns += self._settle(key, loan)
        self._counts["orphaned"] += orphans
        return returns, orphans

    def statistics(self) -> Dict[str, int]:
        return {"loans": len(self._loans), **self._counts}

    def _settle(self, key: Key, loan: _Loan) -> Returns:
        if loan.used_here > 0 or loan.lent:
            return []
        del self._loans[key]
        return [(lender, key, count) for lender, count in loan.owed.items()]
