"""`cosmos-actor sim record`: a scripted expert does a simulator's tasks, and what it saw and did becomes a dataset.

With noise, what is done differs from what the expert said, and what it said is written down: a policy that learns from
it has seen how to come back (DART, Laskey et al. 2017, https://arxiv.org/abs/1703.09327).

Legend: T steps of an episode.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from .checked import CheckedSession
from .checks import BadRequest, checked_actions
from .contract import (
    BOX,
    BY_SEED,
    SUCCESS,
    Description,
    NoExpert,
    SimSession,
    Simulator,
    TaskSpec,
    WorkUnit,
)
from .lerobot_format import WITHOUT_RATE_HZ, texts_of
from .lerobot_writer import DatasetWriter, Episode
from .messages import SUCCEEDED, Assignment, Reset, Step
from .mistakes import Mistake
from .recording_workers import Came, Wanted, Workers
from .telling import plain

MOST_ERRORS = 5
"""Episodes in a row in which the simulator or its expert raised: more of them tell nothing new."""
LONGEST = 100_000
"""Steps of an episode that nothing else ends."""


class RecordOptions(NamedTuple):
    """What is asked for."""

    directory: Path
    episodes: int = 50
    """Of each task."""
    tasks: Sequence[str] = ()
    """Empty: all."""
    noise: float = 0.0
    """Standard deviation, in units of the action."""
    seed: int = 0
    only_success: bool = False
    video: bool = False
    workers: int = 1
    """Processes, each with a simulator of its own."""
    name: str = ""
    """KIND:ID, by which workers load theirs."""


class Recorded(NamedTuple):
    """What came of it."""

    tried: int
    succeeded: int
    errors: int
    written: int
    frames: int
    bytes: int


def record(simulator: Simulator, description: Description, options: RecordOptions,
           tell: Callable[[str], None]) -> Recorded:
    """Record; `tell` gets a line a task. Raises Mistake, and has left nothing behind then."""
    tasks = chosen(description, options)
    writer = DatasetWriter(options.directory, description, texts_of(tasks),
                           description.control_hz or WITHOUT_RATE_HZ, options.video)
    try:
        source = Workers(options.name, options.noise, options.workers) if options.workers > 1 else Alone(
            simulator.open(1), description, options.noise)
        try:
            counted = _Recording(source, writer, options, tell)
            for index, task in enumerate(tasks):
                counted.task(index, task)
        finally:
            source.close()
        if not counted.written:
            raise Mistake("{}: no episode is there to be written: {} tried, {} succeeded, {} errors{}".format(
                description.simulator, counted.tried, counted.succeeded, counted.errors,
                " (--only-success)" if options.only_success else ""))
        body = simulator.embodiment
        size = writer.finish({
            "description": plain(description, body), "tasks": [task.name for task in tasks], "noise": options.noise,
            "seed": options.seed, "only_success": options.only_success,
            "episodes": {"tried": counted.tried, "succeeded": counted.succeeded, "errors": counted.errors},
        }, robot=None if body is None else body.name)
    except BaseException:
        writer.discard()
        raise
    return Recorded(counted.tried, counted.succeeded, counted.errors, counted.written, writer.frames, size)


def chosen(description: Description, options: RecordOptions) -> List[TaskSpec]:
    """The tasks, in the order of the description. Raises Mistake for what can not be recorded."""
    if not description.expert:
        raise Mistake("{}: {}".format(description.simulator, NoExpert()))
    if options.noise and description.action.kind != BOX:
        raise Mistake("--noise {:g}: the actions of {} are discrete".format(options.noise, description.simulator))
    known = [task.name for task in description.tasks]
    for name in options.tasks:
        if name not in known:
            raise Mistake("--task {}: {} has {}".format(name, description.simulator, ", ".join(known)))
    return [task for task in description.tasks if not options.tasks or task.name in options.tasks]


def unit_of(task: TaskSpec, trial: int, seed: int) -> WorkUnit:
    """Trial k begins in initial state k mod the size of the task's set, or with a seed of its own, which no unit of a
    job has."""
    digest = hashlib.sha256("{}/demonstration of {}/{}".format(seed, task.name, trial).encode()).digest()
    return WorkUnit(
        unit_id="{}/{}".format(task.name, trial), task=task.name, seed=int.from_bytes(digest[:4], "big") >> 1,
        initial_state=trial % task.initial_states if task.initial_states else BY_SEED,
        max_steps=task.max_steps or LONGEST)


class _Recording:
    """Counts, and what is written."""

    def __init__(self, source: Union[Alone, Workers], writer: DatasetWriter, options: RecordOptions,
                 tell: Callable[[str], None]) -> None:
        self._source, self._writer, self._options, self._tell = source, writer, options, tell
        self._errors_in_a_row = 0
        self.tried = self.succeeded = self.errors = self.written = 0

    def task(self, index: int, task: TaskSpec) -> None:
        """All episodes of a task."""
        before = (self.succeeded, self.errors, self.written, self._writer.frames)
        units = [unit_of(task, trial, self._options.seed) for trial in range(self._options.episodes)]
        for episode, error in self._source.episodes([(unit, index) for unit in units]):
            self.tried += 1
            self._count(episode, error)
        succeeded, errors, written, frames = (now - then for now, then in zip(
            (self.succeeded, self.errors, self.written, self._writer.frames), before))
        self._tell("{}: {} of {} succeeded{}, {} written, {:,} frames".format(
            task.name, succeeded, self._options.episodes, ", {} errors".format(errors) if errors else "", written,
            frames))

    def _count(self, episode: Optional[Episode], error: str) -> None:
        if episode is None:
            self.errors += 1
            self._errors_in_a_row += 1
            if self._errors_in_a_row >= MOST_ERRORS:
                raise Mistake("{} errors in a row; the last one: {}".format(MOST_ERRORS, error))
            return
        self._errors_in_a_row = 0
        succeeded = bool(episode.success[-1])
        self.succeeded += succeeded
        if succeeded or not self._options.only_success:
            self._writer.add(episode)
            self.written += 1


class Alone:
    """Episodes of this process."""

    def __init__(self, session: SimSession, description: Description, noise: float) -> None:
        self._session, self._expert = session, Expert(session, description, noise)

    def episodes(self, wanted: Sequence[Wanted]) -> Iterator[Came]:
        for unit, task in wanted:
            episode = self._expert.episode(unit, task)
            yield episode, "" if episode is not None else self._expert.error

    def close(self) -> None:
        self._session.close()


class Expert:
    """Does one unit after another in one world."""

    def __init__(self, session: SimSession, description: Description, noise: float) -> None:
        self._session, self._description, self._noise = session, description, noise
        self._checked = CheckedSession(session, description, 1)
        self._number = 0
        self.error = ""
        """One line of what went wrong last."""

    def episode(self, unit: WorkUnit, task: int) -> Optional[Episode]:
        """What was seen and done, or None after an error. Raises Mistake for an expert that is none."""
        rng = np.random.default_rng([unit.seed, 1])
        seen: Dict[str, List[np.ndarray]] = {name: [] for name in self._description.observations}
        actions, rewards, success = [], [], []
        answer = self._ask(Reset(self._next(), [Assignment(0, unit)]))
        while answer is not None:
            action = self._action(unit)
            if action is None:
                return None
            for name, array in answer.observations.items():
                seen[name].append(array[0])
            answer = self._ask(Step(self._next(), self._disturbed(action, rng)[None, None], np.zeros(1, np.int32)))
            if answer is None:
                return None
            actions.append(action)
            rewards.append(answer.rewards[0, 0])
            success.append(answer.rows[0, SUCCEEDED] == SUCCESS)
            if len(answer.ended):
                return Episode(task, {name: np.stack(arrays) for name, arrays in seen.items()}, np.stack(actions),
                               np.array(rewards, np.float32), np.array(success))
        return None

    def _action(self, unit: WorkUnit) -> Optional[np.ndarray]:
        """What the expert says, within the bounds."""
        try:
            told = np.asarray(self._session.expert([0]))
            return checked_actions(told[:, None], self._description.action, 1)[0, 0]
        except (NoExpert, BadRequest, IndexError) as error:
            raise Mistake("{}, task {}: the expert: {}".format(
                self._description.simulator, unit.task, error)) from error
        except Exception as error:
            self.error = " ".join("{}, task {}: the expert raised {}: {}".format(
                self._description.simulator, unit.task, type(error).__name__, error).split())
            return None

    def _disturbed(self, action: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if not self._noise:
            return action
        return (action + rng.normal(0.0, self._noise, action.shape)).astype(np.float32)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, request: Any) -> Any:
        """Its answer; None where it failed."""
        answer = self._checked.answer(request)
        if answer.failures:
            self.error = answer.failures[0].text
            return None
        return answer
