"""Checks of what a simulator does to its process: speed, memory, descriptors, threads, stdout and stdin."""

from __future__ import annotations

import gc
import time
from typing import Callable, List, Tuple

import numpy as np

from cosmos_actor.simulator_bridge.server import resident_bytes

from .bench import Bench, Failed, Player, Skipped
from .held import can_be_seen, growth, held

MEMORY_BLOCKS, EPISODES_PER_BLOCK = 6, 6
"""Memory is measured after each block but the first, in which caches fill."""
EPISODE_STEPS = 50
"""Longest of these episodes."""
MEMORY_S = 120.0
LEAST_SIZES = 4
"""Fewer measurements say nothing."""
GROWTH_BYTES = 100 * 1024
"""An episode. 10,000 episodes, a day of a slow simulator, cost 1 GB then."""
WARM_UP, OPENED = 2, 20
OPENED_S = 120.0
LEAST_OPENED = 4
LEFT_OPEN = 2
"""What a library keeps for a process's whole life may come late; more than that in 20 openings is a leak."""
RATE_S = 0.3
"""For each rate."""


def memory_does_not_grow(bench: Bench) -> str:
    """Resident size of this process over episodes of one session."""
    if not can_be_seen():
        raise Skipped("there is no /proc here to see it by")
    until, sizes = time.monotonic() + MEMORY_S, []
    with bench.session() as player:
        for block in range(MEMORY_BLOCKS):
            for index in range(EPISODES_PER_BLOCK):
                player.reset({0: bench.unit(index)})
                player.chunk([0], bench.actions(min(bench.steps, EPISODE_STEPS), seed=index)[None])
            gc.collect()
            if block:
                sizes.append(resident_bytes())
            if time.monotonic() > until:
                break
    if len(sizes) < LEAST_SIZES:
        raise Skipped("{} episodes took {:g} s".format((len(sizes) + 1) * EPISODES_PER_BLOCK, MEMORY_S))
    an_episode = growth(sizes, EPISODES_PER_BLOCK)
    seen = "{:.0f} KB an episode over {}, at most {:.0f}".format(
        an_episode / 1024, (len(sizes) + 1) * EPISODES_PER_BLOCK, GROWTH_BYTES / 1024)
    if an_episode > GROWTH_BYTES:
        raise Failed(seen)
    return seen


def nothing_is_left_open(bench: Bench) -> str:
    """Descriptors, threads and child processes after sessions that were opened, used and closed."""
    if not can_be_seen():
        raise Skipped("there is no /proc here to see it by")
    for _ in range(WARM_UP):
        _open_and_close(bench)
    gc.collect()
    before, until, opened = held(), time.monotonic() + OPENED_S, 0
    while opened < OPENED and (time.monotonic() < until or opened < LEAST_OPENED):
        _open_and_close(bench)
        opened += 1
    gc.collect()
    after = held()
    found = ["{} {}".format(n, kind) for kind, n in after.more_than(before).items() if n > min(LEFT_OPEN, opened - 1)]
    if found:
        targets = ", ".join(after.new_targets(before)[:3])
        raise Failed("{} more after {} times open and close{}".format(
            " and ".join(found), opened, ": " + targets if targets else ""))
    return "{} times open and close".format(opened)


def _open_and_close(bench: Bench) -> None:
    with bench.session() as player:
        player.reset({0: bench.unit(1)})
        player.step([0], bench.actions(1))


def rates(bench: Bench) -> str:
    """Nothing can be wrong with them: they are told. Steps are those of all slots together, without looking."""
    slots = list(range(bench.envs))
    chunk = np.stack([bench.actions(bench.steps)] * bench.envs)
    with bench.session() as player:
        player.play({slot: bench.unit(slot) for slot in slots}, bench.actions(2))
        reset_s, steps_s = _reset_and_step(bench, player, slots, chunk)
        begun, looks = time.perf_counter(), 0
        while looks == 0 or time.perf_counter() - begun < RATE_S / 3:
            player.raw.observe(slots)
            looks += 1
        observe_s = (time.perf_counter() - begun) / looks / bench.envs
    return "{:,.0f} steps/s, reset {:.2g} s, observe {:.2g} s a slot".format(steps_s, reset_s, observe_s)


def _reset_and_step(bench: Bench, player: Player, slots: List[int], chunk: np.ndarray) -> Tuple[float, float]:
    """(seconds of a reset of one slot, steps a second of all)"""
    resets = steps = 0
    in_reset = in_step = 0.0
    while in_step + in_reset < RATE_S:
        begun = time.perf_counter()
        player.reset({slot: bench.unit(resets + slot) for slot in slots})
        between = time.perf_counter()
        steps += int(player.chunk(slots, chunk).steps.sum())
        in_reset, in_step = in_reset + between - begun, in_step + time.perf_counter() - between
        resets += len(slots)
    return in_reset / resets, steps / in_step


def nothing_is_printed(bench: Bench) -> str:
    """Over all checks so far. When it attaches, that goes to its log and breaks nothing."""
    stdio = bench.stdio
    if stdio.printed_bytes:
        raise Failed("{} bytes on stdout, such as {}: use logging or stderr".format(
            stdio.printed_bytes, stdio.first_line))
    return "stdout had nothing"


def nothing_is_asked(bench: Bench) -> str:
    """Over all checks so far."""
    if bench.stdio.asked:
        raise Failed("stdin was read {} time{}: nobody is there to answer, and a step that asks fails".format(
            bench.stdio.asked, "s" * (bench.stdio.asked != 1)))
    return "stdin was not read"


CHECKS: List[Callable[[Bench], str]] = [memory_does_not_grow, nothing_is_left_open, rates]
ALWAYS: List[Callable[[Bench], str]] = [nothing_is_printed, nothing_is_asked]
"""Also where nothing else could be looked at."""
