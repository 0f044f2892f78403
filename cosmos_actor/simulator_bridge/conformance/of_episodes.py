"""Checks of the description and of single episodes. Each returns what it saw, or raises Failed or Skipped."""

from __future__ import annotations

import time
from typing import Callable, Dict, List, Tuple

import numpy as np

from cosmos_actor.bus.schema import decode, encode
from cosmos_actor.simulator_bridge.contract import (
    BOX,
    DISCRETE,
    FAILURE,
    SUCCESS,
    UNKNOWN,
    ActionSpec,
    ArraySpec,
    Description,
    NoExpert,
    TaskSpec,
    WorkUnit,
)
from cosmos_actor.simulator_bridge.embodiment import BadEmbodiment

from .bench import Bench, Failed, Moment, Player, Skipped, bounds, difference, moments, trace_difference

DESCRIBE_S = 1.0
"""`describe` is called before anything is built, and whoever attaches waits for it."""
TASKS_S = 120.0
"""For the resets of all tasks; a simulator with many slow ones is looked at as far as that goes."""
SEEDS = 5
MOST_STATES = 16
"""Of one set of initial states; more are not compared."""
MOST_TASKS = 4
"""With a set of initial states."""
TRUNCATED_AT = 3


def describe_is_cheap_and_stable(bench: Bench) -> str:
    begun = time.perf_counter()
    one, other = bench.simulator.describe(), bench.simulator.describe()
    seconds = (time.perf_counter() - begun) / 2
    for name, value in vars(one).items():
        if value != getattr(other, name):
            raise Failed("`{}` is {} and then {}".format(name, value, getattr(other, name)))
    found = contradictions(one)
    if found:
        raise Failed("; ".join(found))
    head, buffers = encode(bench.description)
    if decode(head, buffers) != bench.description:
        raise Failed("it is not the same when it has travelled; its fields are to have the types of `contract`")
    if seconds > DESCRIBE_S:
        raise Failed("it takes {:.1f} s, more than {:g}: build nothing in it".format(seconds, DESCRIBE_S))
    return "{:.1f} ms".format(seconds * 1e3)


def contradictions(description: Description) -> List[str]:
    """What can not be, one line each."""
    names = [task.name for task in description.tasks]
    found = [] if names else ["it has no tasks"]
    found += ["two tasks are called {}".format(name) for name in sorted(set(names)) if names.count(name) > 1]
    found += ["task {} has a negative number".format(task.name) for task in description.tasks
              if task.max_steps < 0 or task.initial_states < 0]
    found += [] if description.observations else ["it has no observations"]
    for name, spec in description.observations.items():
        found += _of_array(name, spec)
    found += _of_action(description.action)
    found += [] if description.max_envs >= 1 else ["max_envs is {}".format(description.max_envs)]
    return found + ([] if description.control_hz >= 0 else ["control_hz is {}".format(description.control_hz)])


def _of_array(name: str, spec: ArraySpec) -> List[str]:
    try:
        numbers = np.dtype(spec.dtype).kind in "fiub"
    except TypeError:
        numbers = False
    found = [] if numbers else ["observation `{}` has dtype {}".format(name, spec.dtype)]
    return found + ([] if all(size >= 1 for size in spec.shape) else [
        "observation `{}` has shape {}".format(name, list(spec.shape))])


def _of_action(spec: ActionSpec) -> List[str]:
    if spec.kind == DISCRETE:
        return [] if spec.n >= 1 else ["a discrete action has n = {}".format(spec.n)]
    if spec.kind != BOX:
        return ["an action is `{}`, not {} or {}".format(spec.kind, DISCRETE, BOX)]
    size = int(np.prod(spec.shape))
    if {len(spec.low), len(spec.high)} - {0, size}:
        return ["an action has {} numbers, {} lower and {} upper bounds".format(size, len(spec.low), len(spec.high))]
    low, high = bounds(spec)
    return ["a lower bound of the action is above its upper one"] if (low > high).any() else []


def every_task_resets(bench: Bench) -> str:
    tasks = bench.description.tasks
    until, done = time.monotonic() + TASKS_S, 0
    with bench.session() as player:
        while done < len(tasks) and time.monotonic() < until:
            some = tasks[done:done + bench.envs]
            _reset(bench, player, {slot: bench.unit(done + slot, task) for slot, task in enumerate(some)})
            done += len(some)
    return "{}{} task{}".format(done, "" if done == len(tasks) else " of {}".format(len(tasks)), "s" * (done != 1))


def _reset(bench: Bench, player: Player, units: Dict[int, WorkUnit]) -> None:
    try:
        player.reset(units)
    except Failed as failure:
        if failure.kind not in ("shape", "not_finite", "observe"):
            raise
        bench.not_as_described = bench.not_as_described or str(failure)


def steps_give_what_is_described(bench: Bench) -> str:
    """Names, shapes, dtypes and finiteness are looked at by `CheckedSession`; at the reset of every task, too."""
    if bench.not_as_described:
        raise Failed(bench.not_as_described)
    episodes = 0
    with bench.session() as player:
        slots = range(bench.envs)
        player.reset({slot: bench.unit(slot) for slot in slots})
        for action in bench.actions(bench.steps):
            became = player.step(slots, np.stack([action] * bench.envs))
            wrong = {moment.success for moment in became.values()} - {UNKNOWN, FAILURE, SUCCESS}
            if wrong:
                raise Failed("success is {}, not {}, {} or {}".format(wrong.pop(), UNKNOWN, FAILURE, SUCCESS))
            over = [slot for slot, moment in became.items() if moment.over]
            episodes += len(over)
            if over:
                player.reset({slot: bench.unit(bench.envs + episodes + slot) for slot in over})
    return "{} steps of {} slot{}, {} episodes ended".format(
        bench.steps, bench.envs, "s" * (bench.envs != 1), episodes)


def looking_changes_nothing(bench: Bench) -> str:
    bench.need_determinism()
    actions = bench.actions(bench.steps)
    with bench.session() as player:
        looked = player.play({0: bench.unit(1)}, actions)[0]
        actions = actions[:len(looked) - 1]
        for _ in range(2):
            apart = difference(looked[-1].observations, player.look(0))
            if apart:
                raise Failed("seen twice without a step between, {}".format(apart))
        player.reset({0: bench.unit(1)})
        stepped = player.chunk([0], actions[None])
        apart = difference(looked[-1].observations, {name: array[0] for name, array in stepped.observations.items()})
    if apart:
        raise Failed("after {} steps with a look after each, and with one at the end, {}".format(len(actions), apart))
    return "{} steps".format(len(actions))


def _same(first: List[Moment], again: List[Moment]) -> str:
    apart = trace_difference(first, again)
    if apart:
        raise Failed("the same unit and actions, but {}".format(apart))
    if len(first) != len(again):
        raise Failed("the same unit and actions took {} and then {} steps".format(len(first) - 1, len(again) - 1))
    return "{} steps".format(len(first) - 1)


def it_repeats_after_other_episodes(bench: Bench) -> str:
    bench.need_determinism()
    actions = bench.actions(bench.steps)
    with bench.session() as player:
        first = player.play({0: bench.unit(1)}, actions)[0]
        for index, task in enumerate(bench.description.tasks[:MOST_TASKS]):
            player.play({0: bench.unit(2 + index, task)}, bench.actions(bench.steps, seed=7))
        return _same(first, player.play({0: bench.unit(1)}, actions)[0])


def it_repeats_in_another_slot(bench: Bench) -> str:
    bench.need_determinism()
    bench.need_slots(2)
    actions, last = bench.actions(bench.steps), bench.envs - 1
    with bench.session() as player:
        alone = player.play({0: bench.unit(1)}, actions)[0]
        units = {slot: bench.unit(2 + slot) for slot in range(last)}
        units[last] = bench.unit(1)
        return _same(alone, player.play(units, actions)[last])


def it_repeats_in_a_fresh_session(bench: Bench) -> str:
    """Whose first episode is another one: some keep what they saw first, as where a camera stands."""
    bench.need_determinism()
    actions = bench.actions(bench.steps)
    with bench.session() as player:
        first = player.play({0: bench.unit(1)}, actions)[0]
    with bench.session() as player:
        player.play({0: bench.unit(2)}, bench.actions(1))
        return _same(first, player.play({0: bench.unit(1)}, actions)[0])


def different_seeds_differ(bench: Bench) -> str:
    task = next((task for task in bench.description.tasks if not task.initial_states), None)
    if task is None:
        raise Skipped("every task has a set of initial states")
    with bench.session() as player:
        first = [player.reset({0: bench.unit(seed, task)})[0].observations for seed in range(SEEDS)]
        if any(difference(first[0], seen) for seen in first[1:]):
            return "{} seeds, at the reset".format(SEEDS)
        traces = [player.play({0: bench.unit(seed, task)}, bench.actions(bench.steps))[0] for seed in range(SEEDS)]
    if not any(_apart(traces[0], trace) for trace in traces[1:]):
        same = "seeds 0 to {} of {} give the same {} steps".format(SEEDS - 1, task.name, len(traces[0]) - 1)
        if bench.simulator.seeds_may_be_alike:
            raise Skipped(same + ": it has one beginning, and trials of one policy are all alike")
        raise Failed(same + "; if it has only one beginning, say so by initial_states=1")
    return "{} seeds, after the reset".format(SEEDS)


def _apart(one: List[Moment], other: List[Moment]) -> bool:
    return len(one) != len(other) or bool(trace_difference(one, other))


def initial_states_differ(bench: Bench) -> str:
    tasks = [task for task in bench.description.tasks if task.initial_states >= 2][:MOST_TASKS]
    if not tasks:
        raise Skipped("no task has a set of initial states")
    with bench.session() as player:
        for task in tasks:
            _all_apart(task, [player.reset({0: bench.unit(index, task)})[0].observations
                              for index in range(min(task.initial_states, MOST_STATES))])
    return ", ".join("{} of {}".format(min(task.initial_states, MOST_STATES), task.initial_states) for task in tasks)


def _all_apart(task: TaskSpec, seen: List[Dict[str, np.ndarray]]) -> None:
    known: Dict[Tuple[bytes, ...], int] = {}
    for index, observations in enumerate(seen):
        key = tuple(observations[name].tobytes() for name in sorted(observations))
        if key in known:
            raise Failed("initial states {} and {} of {} look the same".format(known[key], index, task.name))
        known[key] = index


def max_steps_truncates(bench: Bench) -> str:
    slots = range(bench.envs)
    chunk = np.stack([bench.actions(TRUNCATED_AT + 2)] * bench.envs)
    with bench.session() as player:
        for index in range(2):  # after the end it begins anew, with a limit of its own
            player.reset({slot: bench.unit(index + slot, max_steps=TRUNCATED_AT) for slot in slots})
            stepped = player.chunk(slots, chunk)
            late = [int(slot) for slot, steps in zip(stepped.slots, stepped.steps) if steps > TRUNCATED_AT]
            if late or len(stepped.ended) != bench.envs:
                raise Failed("with max_steps = {} slots {} went on".format(TRUNCATED_AT, late))
            apart = [difference(row.observations, player.look(slot)) for slot, row in moments(stepped).items()]
            if any(apart) and bench.description.deterministic:
                raise Failed("a slot that was cut off did not stay as it was: {}".format(max(apart)))
    return "at step {}".format(TRUNCATED_AT)


def actions_at_the_bounds_are_taken(bench: Bench) -> str:
    spec = bench.description.action
    if spec.kind == DISCRETE:
        edges = {"first": np.asarray(0), "last": np.asarray(spec.n - 1)}
    else:
        low, high = (np.where(np.isfinite(bound), bound, 0.0).astype(np.float32) for bound in bounds(spec))
        edges = {"lowest": low, "highest": high, "middle": (low + high) / 2}
    with bench.session() as player:
        for name, action in edges.items():
            player.reset({0: bench.unit(1)})
            _taken(player, name, action)
    return ", ".join(edges)


def _taken(player: Player, name: str, action: np.ndarray) -> None:
    try:
        player.step([0], action[None])
    except Failed as error:
        raise Failed("the {} action: {}".format(name, error)) from error


def the_embodiment_fits(bench: Bench) -> str:
    embodiment, spec = bench.simulator.embodiment, bench.description.action
    if embodiment is None:
        raise Skipped("it has none")
    size = int(np.prod(spec.shape))
    if spec.kind != BOX or embodiment.action_size != size:
        raise Failed("an action of {} has {} numbers, the description's is {} of {}".format(
            embodiment.name, embodiment.action_size, spec.kind, size))
    if embodiment.control_hz and bench.description.control_hz not in (0.0, embodiment.control_hz):
        raise Failed("{} is controlled at {:g} Hz, the description says {:g}".format(
            embodiment.name, embodiment.control_hz, bench.description.control_hz))
    with bench.session() as player:
        seen = player.reset({0: bench.unit(1)})[0].observations
        try:
            embodiment.to_policy({name: array[None] for name, array in seen.items()})
        except BadEmbodiment as error:
            raise Failed(str(error)) from error
        policys = embodiment.to_policy_actions(bench.actions(1))
        player.step([0], embodiment.to_simulator(policys))
    return str(embodiment.name)


def the_expert_acts_within_its_bounds(bench: Bench) -> str:
    if not bench.description.expert:
        raise Skipped("its description says that there is none")
    tasks, actions = bench.description.tasks[:MOST_TASKS], 0
    with bench.session() as player:
        for task in tasks:
            player.reset({0: bench.unit(1, task)})
            for _ in range(bench.steps):
                told = _told_by_the_expert(player, task)
                fault = wrong_action(told, bench.description.action)
                if fault:
                    raise Failed("task {}: it {}".format(task.name, fault))
                actions += 1
                if player.step([0], told)[0].over:
                    break
    return "{} actions in {} task{}".format(actions, len(tasks), "s" * (len(tasks) != 1))


def _told_by_the_expert(player: Player, task: TaskSpec) -> np.ndarray:
    """[1, ...]"""
    try:
        return np.asarray(player.raw.expert([0]))
    except NoExpert as error:
        raise Failed("task {} has none, and the description says that there is one".format(task.name)) from error


def wrong_action(actions: np.ndarray, spec: ActionSpec) -> str:
    """What `actions` [1, ...] are that `spec` is not; empty if nothing."""
    if actions.shape != (1, *spec.shape):
        return "says {} for one slot, not {}".format(list(actions.shape), [1, *spec.shape])
    if actions.dtype != spec.dtype:
        return "says {}, not {}".format(actions.dtype, spec.dtype)
    low, high = (0, spec.n - 1) if spec.kind == DISCRETE else bounds(spec)
    out = ~((actions >= np.asarray(low, actions.dtype)) & (actions <= np.asarray(high, actions.dtype)))
    return "says {}, which is out of bounds".format(actions[out][0]) if out.any() else ""


CHECKS: List[Callable[[Bench], str]] = [
    looking_changes_nothing, it_repeats_after_other_episodes, it_repeats_in_another_slot,
    it_repeats_in_a_fresh_session, different_seeds_differ, initial_states_differ, max_steps_truncates,
    actions_at_the_bounds_are_taken, the_embodiment_fits, the_expert_acts_within_its_bounds,
]
BASICS: List[Callable[[Bench], str]] = [describe_is_cheap_and_stable, every_task_resets, steps_give_what_is_described]
"""Without these there is nothing that the others could look at."""
