"""Whom to kill and when, from a seed; and which kills a job must survive. Pure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from cosmos_actor.job.controller import MOST_REWINDS
from cosmos_actor.job.starts import MOST_IN_VAIN

MEAN_S, MOST_S = 3.0, 12.0
"""Between two kills. A restart takes a few seconds, so that some die before they serve."""
STEPS_A_KILL = 3
"""Steps of the run for each kill. A kill waits no longer than until they are done, so that the last one finds a run."""
STEPS_AFTER = 30
"""Further steps, in which the last one who was killed comes back."""
MOST_WITHOUT_A_STEP = MOST_REWINDS // 2
"""Kills without a step in between. The job gives up at `MOST_REWINDS` rewinds, and some kills bring two."""


@dataclass(frozen=True)
class Kill:
    """One kill: so long after the one before it, whatever its actor does then."""

    actor: str
    after_s: float


def plan(actors: Sequence[str], kills: int, seed: int) -> list[Kill]:
    """Every actor once, in random order, then any."""
    generator = random.Random(seed)
    return [Kill(actor, min(generator.expovariate(1 / MEAN_S), MOST_S))
            for actor in islice(_victims(sorted(actors), generator), kills)]


def steps_of(kills: int) -> int:
    """`run.steps` for so many kills."""
    return kills * STEPS_A_KILL + STEPS_AFTER


def _victims(actors: Sequence[str], generator: random.Random) -> Iterator[str]:
    yield from generator.sample(actors, len(actors))
    while True:
        yield generator.choice(actors)


class Pace:
    """Holds back what ends a job by its own rules: deaths of one actor in a row before it serves, and kills that leave
    no time for a step."""

    def __init__(self) -> None:
        self.furthest = 0
        """The latest step that was ever done; a rewind does not take it back."""
        self._without_a_step = 0
        self._in_vain: Counter[str] = Counter()

    def reached(self, step: int) -> None:
        if step > self.furthest:
            self.furthest, self._without_a_step = step, 0

    def serves(self, actor: str) -> None:
        self._in_vain[actor] = 0

    def killed(self, actor: str) -> None:
        self._without_a_step += 1
        self._in_vain[actor] += 1

    def objection(self, actor: str) -> str:
        """What to wait for before `actor` may be killed; empty when it may be now."""
        if self._without_a_step >= MOST_WITHOUT_A_STEP:
            return f"a step after step {self.furthest}"
        if self._in_vain[actor] >= MOST_IN_VAIN - 1:
            return f"{actor} to serve"
        return ""
