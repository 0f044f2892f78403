"""Who joins and who leaves next, and how. Pure: the same seed and the same answers give the same plan."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

ROLES = ("rollout", "reward")
MOST = {"rollout": 2, "reward": 3}
"""Joined actors of a role at a time. A rollout takes seconds of a core to start: more of them would only start."""
PAUSE_S = (2.0, 4.0)
TWO_AT_ONCE, NAME_AGAIN, DIES_EARLY, LONG_FREEZE = 0.25, 0.25, 0.2, 0.25
"""Shares: of the moments, of the joins (the last two: of the freezes)."""
EARLY_S = {"rollout": (0.3, 9.0), "reward": (0.2, 3.0)}
"""When a life that is to be short is killed: from the start of its interpreter to the first pull of weights."""
FREEZE_S, LONG_FREEZE_S = (1.0, 4.0), (13.0, 16.0)
"""SIGSTOP to SIGCONT; the long one is longer than `bus.lost_after_s`, so that everybody takes it for dead."""
LEAVES = ("interrupt", "terminate", "kill", "kill at work", "freeze")


@dataclass(frozen=True)
class Join:
    """A new actor; killed `dies_after_s` after its start, if that is set."""

    role: str
    name: str
    dies_after_s: float | None = None


@dataclass(frozen=True)
class Leave:
    """SIGINT, SIGTERM, SIGKILL (at work: in the middle of a computation), or SIGSTOP and `freeze_s` later SIGCONT."""

    name: str
    how: str
    freeze_s: float = 0.0


class Plan:
    """Joins and leaves as they fall; nobody leaves twice, and no living actor's name is given away."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names: dict[str, list[str]] = {role: [] for role in ROLES}

    def pause_s(self) -> float:
        return self._random.uniform(*PAUSE_S)

    def moment(self, living: Mapping[str, str], may_leave: Mapping[str, str]) -> list[Join | Leave]:
        """What happens now. `living`, `may_leave`: name -> role of those who are there, of those nothing befell yet."""
        present, leaving = dict(living), dict(may_leave)
        found: list[Join | Leave] = []
        for _ in range(2 if self._random.random() < TWO_AT_ONCE else 1):
            free = [role for role in ROLES if list(present.values()).count(role) < MOST[role]]
            if free and (not leaving or self._random.random() < 0.5):
                join = self._join(self._random.choice(free), present)
                present[join.name] = join.role
                found.append(join)
            elif leaving:
                found.append(self._leave(self._random.choice(sorted(leaving))))
                del leaving[found[-1].name]
        return found

    def _join(self, role: str, present: Mapping[str, str]) -> Join:
        again = [name for name in self._names[role] if name not in present]
        if again and self._random.random() < NAME_AGAIN:
            name = self._random.choice(again)
        else:
            name = f"{role}-joined-{len(self._names[role])}"
            self._names[role].append(name)
        early = self._random.uniform(*EARLY_S[role]) if self._random.random() < DIES_EARLY else None
        return Join(role, name, early)

    def _leave(self, name: str) -> Leave:
        how = self._random.choice(LEAVES)
        if how != "freeze":
            return Leave(name, how)
        long = self._random.random() < LONG_FREEZE
        return Leave(name, how, self._random.uniform(*(LONG_FREEZE_S if long else FREEZE_S)))
