"""The same job in one process: every role a task on one loop, the in-memory transport, the recipe on the main thread.

A role's computation runs on this very thread, so `breakpoint()` in a role, a reward or the recipe stops everything and
shows one stack. Actors that join from elsewhere, restarts and `stop` of a single actor need processes and are not here.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.handle import InlineDriver
from cosmos_actor.actors.head import Head
from cosmos_actor.actors.role import Role
from cosmos_actor.actors.role_names import REGISTRY, REGISTRY_ACTOR
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.actors.worker import InlineWorker
from cosmos_actor.bus import Bus, Identity, KeyRing, MemoryNetwork, MemoryTransport, new_incarnation
from cosmos_actor.job.assembly import PATIENT_S, gateway, inproc_bus, weight_source
from cosmos_actor.job.controller import build_controller, make_job, run_recipe
from cosmos_actor.job.job import Job
from cosmos_actor.job.launch import Observer, Outcome, hang_up
from cosmos_actor.job.roles import CONTROLLER, build_role
from cosmos_actor.job.turns import TURN_TAKERS
from cosmos_actor.recipes.plan import plan, takes_turns
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.simulator_bridge.inproc import InprocSimulator
from cosmos_actor.simulator_bridge.messages import SIMULATOR
from cosmos_actor.simulator_bridge.plugins import SimulatorName
from cosmos_actor.simulator_bridge.server import Place

CLOSE_DEADLINE_S = 10.0


def run_inproc(settings: RunSettings, directory: RunDirectory, observer: Observer) -> Outcome:
    """Run the job to its end on this thread. Exceptions of roles and recipes come through as they are."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(_but_interrupts)
    cluster = InprocCluster(settings, directory, InlineDriver(loop))
    try:
        job = loop.run_until_complete(cluster.open())
        with stopped_by_signals(job, observer):
            last_word = run_recipe(job, lambda reason: observer.notice(f"back to the latest checkpoint: {reason}"))
        return Outcome(last_word.exit_code, last_word.reason)
    finally:
        loop.run_until_complete(asyncio.wait_for(cluster.close(), CLOSE_DEADLINE_S))
        _end_tasks(loop)
        loop.close()
        asyncio.set_event_loop(None)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """What an interrupt left half done: a task that goes with its loop would say so in three lines on the screen."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=CLOSE_DEADLINE_S))


def _but_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ctrl-C in a role's computation has ended the run already; its task need not say so again."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


@contextmanager
def stopped_by_signals(job: Job, observer: Observer) -> Iterator[None]:
    """SIGTERM and SIGHUP let the step in hand be finished and saved. Ctrl-C interrupts at once, as ever in Python.

    Where that is swallowed (in a finalizer, a callback of C) the job ends after the step in hand all the same.

    Only a main thread can say so; elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        observer.notice(f"{name}: finishing the step in hand")
        job.stop_asked.append(f"asked to stop by {name}")

    def interrupt(number: int, frame: Any) -> None:
        job.stop_asked.append("interrupted")
        signal.default_int_handler(number, frame)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, *hang_up())}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class InprocCluster:
    """Head, controller and every role of a run on one loop."""

    def __init__(self, settings: RunSettings, directory: RunDirectory, driver: InlineDriver) -> None:
        self._settings, self._directory, self._driver = patient(settings), directory, driver
        self._network = MemoryNetwork()
        self._clock = SystemClock()
        self._turns = False
        self._runtimes: list[ActorRuntime] = []
        self._simulators: list[InprocSimulator] = []
        self._head: Head

    async def open(self) -> Job:
        """Start everybody; the job that the recipe runs."""
        settings = self._settings
        bus = inproc_bus(self._identity(REGISTRY, REGISTRY_ACTOR), self._network, settings)
        self._head = Head(bus, settings.model_dump(mode="json"), settings.run.seed, clock=time.time)
        address = await self._head.start("memory://head")
        placed = plan(settings)
        actors, self._turns = placed.actors, takes_turns(settings, placed)
        for one in actors:
            if one.role != SIMULATOR:
                await self._start(one.role, one.actor, address)
        for one in actors:
            if one.role == SIMULATOR:
                self._attach(one.actor)
        bus = inproc_bus(self._identity(CONTROLLER, f"{CONTROLLER}-0"), self._network, settings, resolve_bulk=False)
        job = make_job(bus, settings, self._driver, self._directory, self._clock, takes_turns=self._turns)
        runtime = self._runtime(bus, build_controller)
        await runtime.start(address, f"memory://{CONTROLLER}-0")
        self._driver.start(job.watch(runtime))
        for runtime in self._runtimes:  # only now: a model that is being built holds up every connection
            runtime.begin()
        return job

    async def close(self) -> None:
        for simulator in self._simulators:
            await simulator.close()
        for runtime in reversed(self._runtimes):
            await runtime.close()
        await self._head.bus.close(drain_s=0.1)

    def _attach(self, actor: str) -> None:
        """One simulator, stepped on this very thread too."""
        sim = self._settings.sim
        name = SimulatorName.parse(sim.kind, sim.options)
        key = KeyRing.load(self._directory.keys / f"{SIMULATOR}.key")
        self._simulators.append(InprocSimulator(name, sim.envs, Place("memory://rollout-0", actor, key, PATIENT_S),
                                                lambda: MemoryTransport(self._network)))

    async def _start(self, role: str, actor: str, head: str) -> None:
        bus = inproc_bus(self._identity(role, actor), self._network, self._settings)
        runtime = self._runtime(bus, lambda context: build_role(role, context))
        await runtime.start(head, f"memory://{actor}")

    def _runtime(self, bus: Bus, build: Callable[[Context], Role]) -> ActorRuntime:
        runtime = ActorRuntime(bus, build, self._settings, self._settings.run.seed, worker=InlineWorker(),
                               clock=self._clock, weights=weight_source(bus, self._settings),
                               simulators=gateway(bus, self._settings),
                               takes_turns=self._turns and bus.identity.role in TURN_TAKERS)
        self._runtimes.append(runtime)
        return runtime

    def _identity(self, role: str, actor: str) -> Identity:
        return Identity(self._directory.run_id, role, actor, new_incarnation())


def patient(settings: RunSettings) -> RunSettings:
    """The settings without deadlines on answers: whoever sits in a debugger decides how long a step takes."""
    run = settings.run.model_copy(update={"deadline_s": PATIENT_S})
    weights = settings.weights.model_copy(update={"deadline_s": PATIENT_S})
    reward = settings.reward.model_copy(update={"deadline_s": PATIENT_S})
    sim = settings.sim.model_copy(update=dict.fromkeys(("step_s", "reset_s", "silent_s"), PATIENT_S))
    return settings.model_copy(update={"run": run, "weights": weights, "reward": reward, "sim": sim})
