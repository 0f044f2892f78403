"""Checks of what a session's slots do to each other, and of what happens when an episode is over."""

from __future__ import annotations

import time
from typing import Callable, List, NamedTuple, Optional

import numpy as np

from cosmos_actor.simulator_bridge.checked import NO_LIMIT
from cosmos_actor.simulator_bridge.slots import ENDS

from .bench import Bench, Failed, Moment, Player, Seen, Skipped, close_quietly, difference

EPISODES = 6
END_STEPS = 1000
"""An episode that does not end by its own rules within so many random steps is given up."""
END_S = 20.0
"""For all of these episodes together."""
BEGINNINGS = 16
"""First observations that are looked at to know what a beginning looks like."""
JUMP = 3.0
"""Times the usual step: a last step that far, to where episodes begin, is no step but a reset."""
LEAST_ENDINGS = 3
"""That all have to end so: one may by chance."""


class Ending(NamedTuple):
    """An episode that ended by its own rules."""

    first: Seen
    path: List[Seen]
    """What was seen after each step but the last."""
    last: Seen


def an_ended_slot_stays_as_it_was(bench: Bench) -> str:
    until = time.monotonic() + END_S
    endings: List[Ending] = []
    with bench.session() as player:
        beginnings = [player.reset({0: bench.unit(100 + index)})[0].observations for index in range(BEGINNINGS)]
        for index in range(EPISODES):
            ending = _until_it_ends(bench, player, index, until)
            if ending is None:
                break
            endings.append(ending)
            if bench.description.deterministic:
                _stays(bench, player, ending)
        player.reset({0: bench.unit(1)})
        player.step([0], bench.actions(1))
    if not endings:
        raise Skipped("no episode ended by its own rules within {} random steps and {:g} s".format(
            END_STEPS, END_S))
    found = looks_like_a_reset(endings, beginnings)
    if found:
        raise Failed(found + ": a session never resets a slot by itself")
    return "{} episodes".format(len(endings))


def _until_it_ends(bench: Bench, player: Player, index: int, until: float) -> Optional[Ending]:
    """In slot 0; None: it did not."""
    first = player.reset({0: bench.unit(index, max_steps=NO_LIMIT)})[0].observations
    path: List[Seen] = []
    for action in bench.actions(END_STEPS, seed=index):
        became: Moment = player.step([0], action[None])[0]
        if became.over:
            return Ending(first, path or [first], became.observations)
        path.append(became.observations)
        if time.monotonic() > until:
            break
    return None


def _stays(bench: Bench, player: Player, ending: Ending) -> None:
    """Looked at again, and after other slots have begun and made a step."""
    for after in ("was seen again", "others went on"):
        if after == "others went on" and bench.envs > 1:
            others = list(range(1, bench.envs))
            player.reset({slot: bench.unit(50 + slot) for slot in others})
            player.step(others, np.stack([bench.actions(1)[0]] * len(others)))
        apart = difference(ending.last, player.look(0))
        if apart:
            raise Failed("its episode was over, and when {} {}".format(after, apart))


def looks_like_a_reset(endings: List[Ending], beginnings: List[Seen]) -> str:
    """What speaks for it that the last observations are first ones of another episode; empty if nothing does."""
    if all(_ends_with_its_first(ending) for ending in endings):
        return "the last observation of an episode is its first one"
    begun = np.stack([_flat(seen) for seen in beginnings])
    low, high = begun.min(axis=0), begun.max(axis=0)
    if len(endings) >= LEAST_ENDINGS and all(_jumps_into(low, high, ending) for ending in endings):
        return "each of {} episodes seems to end with a jump to where episodes begin".format(len(endings))
    return ""


def _ends_with_its_first(ending: Ending) -> bool:
    """Which it has not seen on its way: who turns left and right again, and is done, does that by the rules."""
    return not difference(ending.last, ending.first) and all(
        difference(seen, ending.first) for seen in ending.path)


def _jumps_into(low: np.ndarray, high: np.ndarray, ending: Ending) -> bool:
    """Whether the last observation is among the beginnings, and further from the one before than a step goes."""
    margin = 0.1 * (high - low)
    last, path = _flat(ending.last), [_flat(ending.first), *map(_flat, ending.path)]
    steps = [float(np.linalg.norm(after - before)) for before, after in zip(path, path[1:])]
    usual = float(np.median([step for step in steps if step] or [np.inf]))
    within = bool(((last >= low - margin) & (last <= high + margin)).all())
    return within and float(np.linalg.norm(last - path[-1])) > JUMP * usual


def _flat(seen: Seen) -> np.ndarray:
    return np.concatenate([np.nan_to_num(seen[name].astype(np.float64).ravel()) for name in sorted(seen)])


def slots_leave_each_other_alone(bench: Bench) -> str:
    bench.need_determinism()
    bench.need_slots(2)
    with bench.session() as player:
        player.reset({slot: bench.unit(slot) for slot in (0, 1)})
        before = player.look(1)

        def look(what: str) -> None:
            apart = difference(before, player.look(1))
            if apart:
                raise Failed("slot 1 did nothing while slot 0 {}, but {}".format(what, apart))

        player.reset({0: bench.unit(9)})
        look("was reset")
        _play_on(bench, player)
        look("was stepped to its end")
        player.reset({0: bench.unit(8)})
        look("was reset after its end")
        player.step([1], bench.actions(1))
    return "reset, steps, end"


def _play_on(bench: Bench, player: Player) -> None:
    """Slot 0, until its episode or the suite's number of steps is over."""
    for action in bench.actions(bench.steps, seed=3):
        if player.step([0], action[None])[0].over:
            break


def step_after_close_raises(bench: Bench) -> str:
    session = bench.simulator.open(bench.envs)
    player = Player(session, bench.description, bench.envs)
    player.reset({0: bench.unit(1)})
    session.close()
    try:
        session.step([0], bench.actions(1))
    except ENDS:
        raise
    except BaseException as error:
        return "raises {}".format(type(error).__name__)
    finally:
        close_quietly(session)
    raise Failed("it gave an outcome; a session that is closed has let go of its worlds")


CHECKS: List[Callable[[Bench], str]] = [
    an_ended_slot_stays_as_it_was, slots_leave_each_other_alone, step_after_close_raises,
]
