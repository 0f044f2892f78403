"""When questions of many simulators leave as one forward pass, and that each gets its own rows back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cosmos_actor.roles.acting import Acted, BatchedActing

NEVER_S = 1e9
"""A wait that no test outlasts: what leaves has left for another reason."""


class Policy:
    """Acts by what it sees; `rows` is how many each forward pass had."""

    def __init__(self, *, asking: int, least_rows: int = 0, max_wait_s: float = NEVER_S) -> None:
        self.rows: list[int] = []
        self.acting = BatchedActing(self._act, max_wait_s, least_rows)
        self.acting.asking = asking

    async def _act(self, observations: Any, noise: np.ndarray) -> Acted:
        self.rows.append(len(noise))
        if noise.max() > 1:
            raise RuntimeError("the policy is broken")
        seen = observations["state"]
        return Acted(seen, seen, seen, 7, seen[:, None])

    def ask(self, *seen: float) -> asyncio.Task[Acted]:
        """One simulator's question, with a row for each of `seen`."""
        state = np.array(seen, np.float32)
        return asyncio.ensure_future(self.acting.act({"state": state}, np.minimum(state, 2.0)))


def run(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, 10.0))


async def turn() -> None:
    """Whatever can happen without time passing has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_all_who_take_turns_are_one_pass_and_each_gets_its_own_rows() -> None:
    async def scene() -> None:
        policy = Policy(asking=3)
        first, second = policy.ask(0.1, 0.2), policy.ask(0.3)
        await turn()
        assert policy.rows == []
        third = policy.ask(0.4, 0.5)
        answers = [await asked for asked in (first, second, third)]
        assert [answer.actions.tolist() for answer in answers] == [
            pytest.approx([0.1, 0.2]), pytest.approx([0.3]), pytest.approx([0.4, 0.5])]
        assert policy.rows == [5]
        assert policy.acting.statistics() == {"batches": 1, "questions": 3, "rows": 5}

    run(scene())


def test_with_least_rows_the_first_who_are_enough_leave_without_the_others() -> None:
    async def scene() -> None:
        policy = Policy(asking=4, least_rows=3)
        first = policy.ask(0.1, 0.2)
        await turn()
        assert policy.rows == []  # two rows are not enough
        second = policy.ask(0.3, 0.4)
        assert (await first).actions.tolist() == pytest.approx([0.1, 0.2])
        assert (await second).actions.tolist() == pytest.approx([0.3, 0.4])
        late = [policy.ask(0.5, 0.6), policy.ask(0.7, 0.8)]
        assert [(await asked).actions[0] for asked in late] == pytest.approx([0.5, 0.7])
        assert policy.rows == [4, 4]

    run(scene())


def test_one_question_may_be_enough_alone() -> None:
    async def scene() -> None:
        policy = Policy(asking=4, least_rows=2)
        assert len((await policy.ask(0.1, 0.2, 0.3)).actions) == 3
        assert policy.rows == [3]

    run(scene())


def test_more_rows_than_there_are_hold_nobody_up() -> None:
    async def scene() -> None:
        policy = Policy(asking=2, least_rows=100)
        await asyncio.gather(policy.ask(0.1), policy.ask(0.2))
        assert policy.rows == [2]

    run(scene())


@pytest.mark.parametrize("least_rows", [0, 3])
def test_the_first_waits_no_longer_than_its_time(least_rows: int) -> None:
    async def scene() -> None:
        policy = Policy(asking=3, least_rows=least_rows, max_wait_s=0.001)
        assert len((await policy.ask(0.1)).actions) == 1
        assert policy.rows == [1]

    run(scene())


def test_a_failure_reaches_all_of_its_batch_and_nobody_else() -> None:
    async def scene() -> None:
        policy = Policy(asking=4, least_rows=2)
        for asked in [policy.ask(5.0), policy.ask(0.1)]:
            with pytest.raises(RuntimeError, match="the policy is broken"):
                await asked
        await asyncio.gather(policy.ask(0.1), policy.ask(0.2))
        assert policy.rows == [2, 2]

    run(scene())
