"""The controller: runs the recipe's loop to its end, from the latest checkpoint again when a stateful actor dies."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from cosmos_actor.actors.context import ActorClock, Context, SystemClock
from cosmos_actor.actors.dead_letters import DeadLetters, Poison
from cosmos_actor.actors.disk import refusal
from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.fleet import Fleet, StateLost
from cosmos_actor.actors.handle import Driver, ThreadDriver
from cosmos_actor.actors.ledger import Ledger
from cosmos_actor.actors.loading import load_object
from cosmos_actor.actors.messages import JobFinished
from cosmos_actor.actors.role import Role
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.actors.runtime import ActorRuntime, HeadLost
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Bus, RemoteError
from cosmos_actor.bus.errors import BulkFull
from cosmos_actor.job.intake import ShortSample
from cosmos_actor.job.job import Job, StopAsked
from cosmos_actor.job.journal import Journal
from cosmos_actor.job.roles import CONTROLLER, STATEFUL
from cosmos_actor.job.weights import WeightsNotTaken
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.trainer.checkpoint import CheckpointError
from cosmos_actor.weight_plane.errors import WeightsLate

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
MAX_IN_FLIGHT = 2
"""Questions that one member holds at a time: one it computes and one that waits, so that it never idles in between."""
UNFIT = frozenset({WeightsLate.__name__})
"""What a rollout raises that has not taken weights which others have."""
MOST_REWINDS = 10
"""Rewinds in a row that bring the job no step further. A fault that every life meets must end the job, not spin it."""
MISTAKES = frozenset(kind.__name__ for kind in (UserError, CheckpointError, BulkFull, *UserError.__subclasses__()))
"""What a role raises for something that a person can put right, by the name under which it comes over the bus."""
LAST_WORD_DEADLINE_S = 15.0
"""Time enough for a head that is just being restarted."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Finish and save the step in hand, then end. SIGTERM ends the controller at once: the latest checkpoint is whole."""


class ControllerRole(Role):
    """Answers nothing; it is the one that asks."""

    name = CONTROLLER


def make_job(bus: Bus, settings: RunSettings, driver: Driver, paths: RunPaths, clock: ActorClock, *,
             takes_turns: bool = False) -> Job:
    """The job over `bus`. To be made on the bus's loop, before the bus is connected. `takes_turns`: see hand_off.py."""
    fleet = Fleet(bus, stateful=STATEFUL, max_in_flight=MAX_IN_FLIGHT, clock=clock, unfit=UNFIT,
                  poison_deaths=settings.supervisor.poison_deaths, letters=DeadLetters(paths, clock.wall))
    return Job(settings, bus=bus, fleet=fleet, driver=driver, clock=clock, paths=paths, ledger=Ledger(paths.ledger),
               journal=Journal(paths.metrics, clock), takes_turns=takes_turns)


def run_recipe(job: Job, on_rewind: Callable[[str], None]) -> JobFinished:
    """Run the recipe to its end from where the run directory says it is. Mistakes of the user end it; others rise.

    Raises StateLost when `MOST_REWINDS` rewinds in a row brought the job no step further.
    """
    loop = load_recipe(job.settings.run.loop)
    reason, furthest, in_vain = "the controller started", -1, 0
    try:
        while True:
            try:
                job.restore(reason)
                loop(job)
                return JobFinished(FINISHED, f"all {job.last_step} steps are done", 0)
            except StateLost as lost:
                in_vain = in_vain + 1 if job.step <= furthest else 0
                if in_vain == MOST_REWINDS:
                    raise
                reason, furthest = str(lost), max(furthest, job.step)
                on_rewind(reason)
    except StopAsked as stop:
        return JobFinished(STOPPED, f"stopped after step {job.step} of {job.last_step}: {stop}", 0)
    except UserError as mistake:
        return JobFinished(FAILED, str(mistake), 2)
    except (Poison, ShortSample, WeightsNotTaken) as end:  # the job found it out: a traceback says nothing more
        return JobFinished(FAILED, str(end), 1)
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        return JobFinished(FAILED, str(refused), 2)
    except RemoteError as failure:
        if failure.kind not in MISTAKES:
            raise
        return JobFinished(FAILED, failure.remote_text, 2)
    finally:
        job.close()


def load_recipe(name: str) -> Callable[[Job], None]:
    """The loop that `run.loop` names: one of the project's recipes, or package.module:function."""
    path = name if ":" in name else f"cosmos_actor.recipes.{name}:run"
    return load_object(path, setting="run.loop")  # type: ignore[no-any-return]


class ControllerProcess:
    """The controller as a process of its own: the bus's loop in a thread, the recipe in the main thread."""

    def __init__(self, make_bus: Callable[[], Bus], settings: RunSettings, paths: RunPaths, *,
                 takes_turns: bool = False) -> None:
        self._driver = ThreadDriver()
        self._settings, self._paths = settings, paths
        self._clock = SystemClock()
        self._make_bus, self._takes_turns = make_bus, takes_turns

    def run(self, head_address: str, listen: str) -> int:
        """0 once the head knows how the job ended, well or not. A controller that is killed is started again."""
        asked: list[str] = []
        signal.signal(DRAIN_SIGNAL, lambda number, frame: asked.append("asked to stop"))
        job, runtime = self._wait(self._open(head_address, listen))
        job.stop_asked = asked
        last_word = self._run_recipe(job)
        self._wait(runtime.tell_head(last_word, deadline_s=LAST_WORD_DEADLINE_S))
        self._wait(runtime.close())
        return 0

    def _run_recipe(self, job: Job) -> JobFinished:
        try:
            return run_recipe(job, lambda reason: job.tell("rewind", reason=reason))
        except HeadLost:
            raise  # there is nobody to tell
        except Exception as failure:  # outermost: a controller that is started again would meet it again, for ever
            traceback.print_exc()
            return JobFinished(FAILED, f"{type(failure).__name__}: {failure}", 1)

    async def _open(self, head_address: str, listen: str) -> tuple[Job, ActorRuntime]:
        bus = self._make_bus()
        job = make_job(bus, self._settings, self._driver, self._paths, self._clock, takes_turns=self._takes_turns)
        runtime = ActorRuntime(bus, build_controller, self._settings, self._settings.run.seed,
                               worker=ThreadWorker("controller"), clock=self._clock,
                               blocked_s=self._settings.supervisor.stuck_s,
                               head_back_s=self._settings.supervisor.start_s)
        job.waiting = partial(runtime.context.waiting, on="")
        runtime.questions = job.questions
        await runtime.start(head_address, listen)
        runtime.begin()
        self._driver.start(job.watch(runtime))
        return job, runtime

    def _wait(self, coroutine: Any) -> Any:
        return self._driver.start(coroutine).result(timeout=60.0)


def build_controller(context: Context) -> Role:
    return ControllerRole(context)
