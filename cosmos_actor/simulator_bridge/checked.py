"""A session behind its contract: requests in, answers out, and every fault of the simulator a typed failure of a slot.

    idle ──reset──> running ──its episode ends──> begins the unit queued for it, or is idle
                       └─────raised, broke the contract──> idle, with a SlotFailure

Knows of no socket. Legend: n slots of a request, m of them whose episode ended, K actions of a chunk.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from .checks import (
    BadRequest,
    all_finite,
    checked_actions,
    checked_outcome,
    checked_slots,
    copied_observations,
    no_observations,
    not_finite,
    parsed_specs,
)
from .chunk import EVERY, Chunk, Failures
from .contract import BY_SEED, Description, Outcome, SimSession, SimulatorError, SlotErrors, WorkUnit
from .messages import TERMINATED, TRUNCATED, Assignment, Reset, SlotFailure, Step, Stepped
from .pace import Pace
from .slots import ENDS

log = logging.getLogger(__name__)

NO_LIMIT = 2**62
LONGEST_TEXT = 500
"""Characters of a failure's line: some simulators put a whole model file into their errors."""


class CheckedSession:
    """Answers every request that makes sense, whatever the simulator does, and no request twice.

    What one slot does wrong fails that slot. A step of several slots that raises fails all of them, since nobody knows
    how far it got, unless the session raised `SlotErrors`.
    """

    def __init__(self, session: SimSession, description: Description, envs: int, *, pace: Optional[Pace] = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._session, self._description, self._envs = session, description, envs
        self._every = list(range(envs))
        self._specs = parsed_specs(description)
        self._pace = pace or Pace()
        self._clock = clock
        self._met: Set[Tuple[int, str]] = set()
        """Slots, and tasks that they have begun."""
        self._new_to: Dict[str, Set[int]] = {"step": set(), "observe": set()}
        """Kind of call -> slots that have begun a task that is new to them, and were not called so since."""
        self.forget()

    def forget(self) -> None:
        """Somebody else asks from now on: every slot is idle, and requests are counted anew."""
        self._units: List[Optional[WorkUnit]] = [None] * self._envs
        self._queued: Dict[int, WorkUnit] = {}
        self._left = np.full(self._envs, NO_LIMIT, np.int64)
        """Steps that each slot's episode may still take."""
        self._sure = 0
        """No slot is at its limit before it was stepped so often."""
        self._uncounted = 0
        """Steps of every slot that are not in `_left` yet: numbers cost a tenth of an array."""
        self._last: Optional[Stepped] = None

    def answer(self, request: Union[Reset, Step]) -> Stepped:
        """Its answer: the same one if this request was answered last. Raises BadRequest, and has done nothing then."""
        if self._last is not None and request.number <= self._last.number:
            if request.number == self._last.number:
                return self._last
            raise BadRequest("request {} is older than the last one, {}".format(request.number, self._last.number))
        begun = self._clock()
        chunk = self._reset(request) if isinstance(request, Reset) else self._step(request)
        self._last = self._stepped(request.number, chunk, begun)
        return self._last

    # ---- requests

    def _reset(self, request: Reset) -> Chunk:
        slots = checked_slots([item.slot for item in request.assignments], self._envs)
        self._check_queue(request.queue)
        chunk = Chunk(slots, 0)
        for slot in slots:
            self._idle(slot)
        self._enqueue(request.queue)
        chunk.failures.update(self._begin({item.slot: item.unit for item in request.assignments}))
        return chunk

    def _step(self, request: Step) -> Chunk:
        slots = self._every if request.slots is None else checked_slots(request.slots, self._envs)
        units = self._units
        idle = [slot for slot in slots if units[slot] is None]
        if idle:
            raise BadRequest("slots {} are idle: reset them first".format(idle))
        actions = checked_actions(request.actions, self._description.action, len(slots))
        if request.queue:
            self._check_queue(request.queue)
            self._enqueue(request.queue)
        chunk = Chunk(slots, actions.shape[1], slots is self._every)
        if request.intermediate:
            chunk.intermediate = {
                name: np.zeros((len(slots), max(0, chunk.K - 1), *spec.shape), spec.dtype)
                for name, spec in self._description.observations.items()}
        for k in range(chunk.K):
            if not chunk.goes_on:
                break
            self._act(chunk, k, actions)
            if request.intermediate and k < chunk.K - 1 and chunk.goes_on:
                self._look_between(chunk, k)
        return chunk

    def _check_queue(self, queue: Sequence[Assignment]) -> None:
        checked_slots([item.slot for item in queue], self._envs)

    def _enqueue(self, queue: Sequence[Assignment]) -> None:
        self._queued.update({item.slot: item.unit for item in queue})

    def _stepped(self, number: int, chunk: Chunk, begun: float) -> Stepped:
        """Look where the chunk ended, begin what is queued there, and put the answer together."""
        slots, observations, failures = self._observe(chunk.not_failed())
        if failures:
            chunk.failures.update(failures)
        rewards, rows, intermediate = chunk.of(slots)
        final: Dict[str, np.ndarray] = {}
        if chunk.some_ended:
            flags = rows[:, TERMINATED:TRUNCATED + 1].tolist()
            over = [index for index, flag in enumerate(flags) if 1 in flag]
            if over:
                final = {name: array.take(over, axis=0) for name, array in observations.items()}
                chunk.failures.update(self._go_on([slots[index] for index in over], over, observations))
        failed = [SlotFailure(slot, error.kind, error.text) for slot, error in sorted(chunk.failures.items())]
        return Stepped(number, observations, rewards, rows, final, intermediate, failed, self._clock() - begun)

    def _go_on(self, ended: List[int], over: List[int], observations: Dict[str, np.ndarray]) -> Failures:
        """Begin what is queued for slots whose episode ended; their first observations take the last ones' places."""
        following = {slot: self._queued[slot] for slot in ended if slot in self._queued}
        for slot in ended:
            self._idle(slot)
        failures = self._begin(following)
        seen, first, unseen = self._observe([slot for slot in following if slot not in failures])
        row_of = dict(zip(ended, over))
        for name, array in first.items():
            rows = observations[name]
            for slot, row in zip(seen, array):
                rows[row_of[slot]] = row
        failures.update(unseen)
        return failures

    # ---- one call of the session each

    def _begin(self, units: Dict[int, WorkUnit]) -> Failures:
        """Reset these slots; those that are not returned run."""
        failures: Failures = {}
        limits: Dict[int, int] = {}
        for slot, unit in units.items():
            try:
                limits[slot] = self._limit(unit)
            except SimulatorError as error:
                failures[slot] = self._failure("reset", error, slot, unit)
        failures.update(self._reset_slots({slot: units[slot] for slot in limits}))
        for slot, limit in limits.items():
            if slot not in failures:
                self._units[slot] = units[slot]
                self._left[slot] = limit + self._uncounted
                self._sure = min(self._sure, limit)
        return failures

    def _reset_slots(self, units: Dict[int, WorkUnit]) -> Failures:
        if not units:
            return {}
        tasks = sorted({unit.task for unit in units.values()})
        unmet = {(slot, unit.task) for slot, unit in units.items()} - self._met
        if unmet:
            self._met |= unmet
            for new in self._new_to.values():
                new.update(slot for slot, _ in unmet)
        try:
            with self._pace("reset", *tasks, slots=len(units), first=bool(unmet)):
                self._session.reset(list(units), list(units.values()))
        except ENDS:
            raise
        except SlotErrors as some:
            return {slot: self._failure("reset", error, slot, units[slot]) for slot, error in some.errors.items()}
        except BaseException as error:  # whatever it raises is the slots' failure
            if len(units) == 1:
                return {slot: self._failure("reset", error, slot, unit) for slot, unit in units.items()}
            self._met -= unmet  # the others may not have had their turn yet
            failures: Failures = {}
            for slot, unit in units.items():  # a reset can be repeated, and only some of them may be at fault
                failures.update(self._reset_slots({slot: unit}))
            return failures
        return {}

    def _act(self, chunk: Chunk, k: int, actions: np.ndarray) -> None:
        """One action of each slot that still runs."""
        rows, slots, where = chunk.acting()
        try:
            outcome, errors = self._outcome(slots, actions[rows, k])
        except ENDS:
            raise
        except BaseException as error:  # nobody knows how far it got: it is not done again
            self._fail(chunk, {slot: self._failure("step", error, slot) for slot in slots})
            return
        if not all_finite(outcome.rewards):
            for index in np.flatnonzero(~np.isfinite(outcome.rewards)):
                text = "the reward is {}".format(outcome.rewards[index])
                errors.setdefault(slots[index], SimulatorError("not_finite", text))
        chunk.note(rows, k, outcome, self._spent(where))
        if errors:
            self._fail(chunk, {slot: self._failure("step", error, slot) for slot, error in errors.items()})

    def _first(self, kind: str, slots: List[int]) -> bool:
        """Whether one of them is called so for the first time since it began a task that was new to it."""
        new = self._new_to[kind]
        if not new or new.isdisjoint(slots):
            return False
        new.difference_update(slots)
        return True

    def _spent(self, where: Any) -> Optional[np.ndarray]:
        """Count one step for each of these slots: for which of them was it the last that they may take? None: none."""
        self._sure -= 1
        if where is EVERY:
            self._uncounted += 1
            if self._sure > 0:
                return None
        else:
            self._left[where] -= 1
            if self._sure > 0:
                return None
        left = self._counted()
        self._sure = int(left.min())
        return left[where] <= 0  # type: ignore[no-any-return]

    def _counted(self) -> np.ndarray:
        """`_left` with all steps in it."""
        self._left -= self._uncounted
        self._uncounted = 0
        return self._left

    def _outcome(self, slots: List[int], actions: np.ndarray) -> Tuple[Outcome, Dict[int, Any]]:
        errors: Dict[int, Any] = {}
        try:
            with self._pace("step", slots=len(slots), first=self._first("step", slots)):
                outcome: Optional[Outcome] = self._session.step(slots, actions)
        except SlotErrors as some:
            outcome, errors = some.outcome, dict(some.errors)
        if not isinstance(outcome, Outcome):
            raise SimulatorError("shape", "step gave {} and no Outcome".format(type(outcome).__name__))
        return checked_outcome(outcome, len(slots)), errors

    def _look_between(self, chunk: Chunk, k: int) -> None:
        seen, observations, failures = self._observe([chunk.slots[row] for row in chunk.going_on()])
        row_of = chunk.row_of
        for name, array in observations.items():
            chunk.intermediate[name][[row_of[slot] for slot in seen], k] = array
        self._fail(chunk, failures)

    def _observe(self, slots: List[int]) -> Tuple[List[int], Dict[str, np.ndarray], Failures]:
        """(slots that could be seen, what they see, what was wrong with the others, which are idle now)."""
        if not slots:
            return [], no_observations(self._specs), {}
        try:
            with self._pace("observe", slots=len(slots), first=self._first("observe", slots)):
                seen = self._session.observe(slots)
            observations = copied_observations(seen, self._specs, len(slots))
        except ENDS:
            raise
        except BaseException as error:  # whatever it raises is the slots' failure
            if len(slots) == 1:
                failures = {slots[0]: self._failure("observe", error, slots[0])}
                self._idle(slots[0])
                return [], no_observations(self._specs), failures
            return self._observe_each(slots)
        found = not_finite(observations, self._specs)
        if not found:
            return slots, observations, {}
        bad = {slots[index]: SimulatorError("not_finite", "observation `{}` is NaN or infinite".format(name))
               for index, name in found}
        failures = {slot: self._failure("observe", error, slot) for slot, error in bad.items()}
        for slot in bad:
            self._idle(slot)
        good = [index for index, slot in enumerate(slots) if slot not in bad]
        return [slots[index] for index in good], {name: array[good] for name, array in observations.items()}, failures

    def _observe_each(self, slots: List[int]) -> Tuple[List[int], Dict[str, np.ndarray], Failures]:
        """Looking changes nothing, so it can be done again, one by one, to see who is at fault."""
        self._new_to["observe"].update(slots)  # the others may not have had their turn yet
        parts = [self._observe([slot]) for slot in slots]
        merged = {name: np.concatenate([observations[name] for _, observations, _ in parts])
                  for name in self._description.observations}
        return ([slot for seen, _, _ in parts for slot in seen], merged,
                {slot: error for _, _, failures in parts for slot, error in failures.items()})

    # ---- slots

    def _limit(self, unit: WorkUnit) -> int:
        """Steps that it may take. Raises SimulatorError for a unit that this simulator does not have."""
        task = self._description.task(unit.task)
        if unit.initial_state != BY_SEED and not 0 <= unit.initial_state < task.initial_states:
            raise SimulatorError("reset", "there is no initial state {}: it has {}".format(
                unit.initial_state, task.initial_states))
        return unit.max_steps or task.max_steps or NO_LIMIT

    def _idle(self, slot: int) -> None:
        self._units[slot] = None
        self._left[slot] = NO_LIMIT
        self._queued.pop(slot, None)

    def _fail(self, chunk: Chunk, failures: Failures) -> None:
        for slot in failures:
            self._idle(slot)
        chunk.fail(failures)

    def _failure(self, doing: str, error: BaseException, slot: int, unit: Optional[WorkUnit] = None) -> SimulatorError:
        """One line that names simulator, task, slot and fault; the traceback goes to the log."""
        kind, text = doing, "{} raised {}: {}".format(doing, type(error).__name__, error)
        if isinstance(error, SimulatorError):
            kind, text = error.kind, error.text
        elif isinstance(error, EOFError):
            text += "; it asked a question, and nobody is there to answer"
        self._met = {(other, met) for other, met in self._met if other != slot}  # what raised may be made anew
        unit = unit or self._units[slot]
        task = "" if unit is None else ", task {}".format(unit.task)
        line = " ".join("{}{}, slot {}: {}".format(self._description.simulator, task, slot, text).split())
        log.warning("%s", line, exc_info=None if isinstance(error, SimulatorError) else error)
        return SimulatorError(kind, line[:LONGEST_TEXT])

