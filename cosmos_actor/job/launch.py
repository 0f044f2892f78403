"""Start a job and see it to its end: supervisor, registry and one process per actor, or everything in this process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.child_state import State
from cosmos_actor.actors.decisions import EndKind
from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.messages import READY, Heard, JobFinished, KillOrder
from cosmos_actor.actors.placement import PlacedActor
from cosmos_actor.actors.restart_policy import Outcome as LifeOutcome
from cosmos_actor.actors.restart_policy import Restart, Strategy
from cosmos_actor.actors.role_names import REGISTRY, REGISTRY_ACTOR, SUPERVISOR, SUPERVISOR_ACTOR
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.supervisor import Supervisor
from cosmos_actor.bus import Identity, KeyFileError, KeyRing, make_run_keys, new_incarnation
from cosmos_actor.bus.socket import reserve
from cosmos_actor.job.assembly import make_bus
from cosmos_actor.job.controller import DRAIN_SIGNAL
from cosmos_actor.job.last_line import MISTAKE
from cosmos_actor.job.registry_link import RegistryLink
from cosmos_actor.job.roles import CONTROLLER, KEYED_ROLES
from cosmos_actor.job.simulator_spec import simulator_spec
from cosmos_actor.job.starts import MOST_IN_VAIN, Starts
from cosmos_actor.job.turns import TURN_TAKERS
from cosmos_actor.recipes.plan import plan, takes_turns
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.simulator_bridge.messages import DRIVER, SIMULATOR

log = logging.getLogger(__name__)

MUTE_S = 3.0
"""A stop waits so long for a role that is found to be silent, all actors of it; then the step in hand never ends."""
MUTE_LOOK_S = 0.25
COMPUTE_ENV = {
    # glibc keeps what a step freed for the next one: given back to the kernel, the same pages are faulted in at every
    # step, a sixth of an update's time for a small model
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    # threads that wait for each other sleep: where actors share cores, spinning ones hold up whom they wait for
    "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0",
}
"""Environment of every actor, unless its section's `env` says otherwise."""


def hang_up() -> tuple[signal.Signals, ...]:
    """SIGHUP, which a terminal that is closed sends: a stop as by SIGTERM, unless `nohup` had it ignored."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


class Door(NamedTuple):
    """Where simulators attach to one driver: a listening socket that outlives the driver's process."""

    listener: int
    """Descriptor."""
    address: str


class Observer(Protocol):
    """Who watches a job. Called from the job's own thread; does not block."""

    def notice(self, text: str) -> None:
        """Something a person should read now, such as what the job is waiting for."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How the job ended: the exit code of the command, and one line."""

    exit_code: int
    reason: str


def launch(settings: RunSettings, *, directory: RunDirectory, inproc: bool, listen: str | None,
           observer: Observer) -> Outcome:
    """Run the job of `directory` to its end, from its latest checkpoint if it has one."""
    keys = _run_keys(directory)
    if inproc:
        refuse_without_simulator(settings)
        from cosmos_actor.job.inproc import run_inproc

        return run_inproc(settings, directory, observer)
    return asyncio.run(Launch(settings, directory, keys, listen, observer).run())


def refuse_without_simulator(settings: RunSettings) -> None:
    """Nobody can attach to a job in one process, and nothing there has a deadline: it would wait for ever."""
    if settings.run.experience != SIMULATOR:
        return
    if not settings.sim.count:
        raise UserError("sim.count = 0: nobody can attach with --inproc; give it at least one simulator of its own",
                        setting="sim.count")
    if settings.rollout.count > 1:
        raise UserError(f"rollout.count = {settings.rollout.count}: with --inproc all simulators are the first "
                        "rollout's, and the others would wait for ever; make it 1", setting="rollout.count")


def _run_keys(directory: RunDirectory) -> dict[str, Path]:
    """Role -> its key file. Fresh ones for a run that lacks one; raises UserError for one that can not be used."""
    keys = {role: directory.keys / f"{role}.key" for role in KEYED_ROLES}
    if not all(path.exists() for path in keys.values()):
        make_run_keys(directory.keys, directory.run_id, KEYED_ROLES)
    try:
        for path in keys.values():
            KeyRing.load(path)
    except KeyFileError as error:
        raise UserError(f"{error.text}; or delete it, then the next start makes new keys", setting="keys") from error
    return keys


class Launch:
    """One host's part of a job, under supervision. Guarantee: when `run` returned, none of its processes is left."""

    def __init__(self, settings: RunSettings, directory: RunDirectory, keys: dict[str, Path], listen: str | None,
                 observer: Observer) -> None:
        self._settings, self._directory, self._keys, self._observer = settings, directory, keys, observer
        self._listen = listen or f"tcp://{settings.bus.host}:{settings.bus.port}"
        self._last_word: JobFinished | None = None
        self._verdict: Outcome | None = None
        self._starts = Starts()
        self._turns = False
        self._stopping: asyncio.Task[Any] | None = None
        self._supervisor: Supervisor
        self._registry: RegistryLink

    async def run(self) -> Outcome:
        """Addresses that others were given are this process's own: they stay while one actor's life follows another."""
        with ExitStack() as open_sockets:
            listener, address = reserve(self._listen)
            open_sockets.enter_context(listener)
            whole = plan(self._settings)
            placed, self._turns = whole.actors, takes_turns(self._settings, whole)
            doors = self._doors([one for one in placed if one.role == DRIVER], open_sockets)
            return await self._supervise(self._specs(address, listener.fileno(), placed, doors), address)

    def _doors(self, drivers: Sequence[PlacedActor], open_sockets: ExitStack) -> dict[str, Door]:
        """Driver -> where simulators attach to it."""
        doors = {}
        if self._settings.run.experience == SIMULATOR:
            for at, driver in enumerate(drivers):
                port = self._settings.sim.port + at if self._settings.sim.port else 0
                listener, address = reserve(f"tcp://{self._settings.bus.host}:{port}")
                open_sockets.enter_context(listener)
                doors[driver.actor] = Door(listener.fileno(), address)
                self._observer.notice(f"simulators attach to {driver.actor}: cosmos-actor attach "
                                      f"{self._settings.sim.kind or 'KIND:ID'} --connect {address} --key "
                                      f"{self._keys[SIMULATOR]}")
        return doors

    async def _supervise(self, specs: list[ChildSpec], address: str) -> Outcome:
        limits = self._settings.supervisor
        self._supervisor = Supervisor(
            specs, run_directory=self._directory, strategy=Strategy(limits.strategy),
            limits=limits.limits(), on_event=self._on_event, on_trouble=self._observer.notice)
        identity = Identity(self._directory.run_id, SUPERVISOR, SUPERVISOR_ACTOR, new_incarnation())
        bus = make_bus(identity, KeyRing.load(self._keys[SUPERVISOR]), self._settings, resolve_bulk=False)
        self._registry = RegistryLink(bus, address, self, self._supervisor.children, self._directory.supervisor_stacks)
        self._listen_to_signals()
        try:
            await self._registry.start()
            await self._supervisor.start()
            end = await self._supervisor.wait()
        finally:
            await self._registry.close()
        return self._outcome(end.kind, end.reason)

    # ---- what runs

    def _specs(self, head: str, listener: int, placed: Sequence[PlacedActor], doors: dict[str, Door]
               ) -> list[ChildSpec]:
        """Registry and controller first, so that they are stopped last; nobody waits for another to start."""
        controller = PlacedActor(
            role=CONTROLLER, index=0, python=sys.executable, devices=(), ranks=1, threads=1, process=-1)
        actors = [one for one in placed if one.role != SIMULATOR]
        simulators = [one for one in placed if one.role == SIMULATOR]
        where = list(doors.values())
        return [self._registry_spec(head, listener),
                *(self._spec(one, head, doors.get(one.actor)) for one in (controller, *actors)),
                *(simulator_spec(self._settings, one, where[at % len(where)].address, self._keys[SIMULATOR])
                  for at, one in enumerate(simulators) if where)]

    def _registry_spec(self, address: str, listener: int) -> ChildSpec:
        command = (sys.executable, "-m", "cosmos_actor.job.registry", "--listen", address, "--listener", str(listener),
                   "--key", str(self._keys[REGISTRY]), "--run-dir", str(self._directory.root))
        limits = self._settings.supervisor
        return ChildSpec(actor=REGISTRY_ACTOR, role=REGISTRY, command=command, pass_fds=(listener,), after=(),
                         alone=True, start_s=limits.start_s, shutdown_s=limits.shutdown_s)

    def _spec(self, placed: PlacedActor, head: str, door: Door | None) -> ChildSpec:
        limits, controls = self._settings.supervisor, placed.role == CONTROLLER
        env = {} if controls else getattr(self._settings, placed.role).env
        return ChildSpec(
            actor=placed.actor, role=placed.role, command=self._command(placed, head, door),
            pass_fds=() if door is None else (door.listener,),
            env={**COMPUTE_ENV, **placed.env, **env},
            restart=Restart.TRANSIENT if controls else Restart.PERMANENT, significant=controls, after=(),
            start_s=limits.start_s, shutdown_s=limits.shutdown_s, heartbeat_s=limits.heartbeat_s)

    def _command(self, placed: PlacedActor, head: str, door: Door | None) -> tuple[str, ...]:
        listening = ("--listen", f"tcp://{self._settings.bus.host}:0") if door is None else (
            "--listen", door.address, "--listener", str(door.listener))
        command = (placed.python, "-m", "cosmos_actor.job.actor", "--role", placed.role, "--actor", placed.actor,
                   "--connect", head, "--key", str(self._keys[placed.role]), *listening,
                   "--run-dir", str(self._directory.root))
        if self._turns and placed.role in (CONTROLLER, *TURN_TAKERS):
            command = (*command, "--turns")
        if placed.ranks == 1:
            return command
        return (placed.python, "-m", "cosmos_actor.actors.launch", "--ranks", str(placed.ranks), "--", *command)

    # ---- what the registry says

    def heard(self, word: Heard) -> None:
        """A life announced itself, or gave its status."""
        self._supervisor.mark_ready(word.actor, word.incarnation)
        if word.state == READY:
            self._starts.served(word.actor, word.incarnation)
        self._supervisor.heartbeat(word.actor, word.incarnation, progress=word.progress, busy_s=word.busy_s)

    def kill(self, order: KillOrder) -> None:
        """The settings say that what is stuck is killed; a later life of it is not."""
        if any(child["incarnation"] == order.incarnation for child in self._supervisor.children()):
            self._supervisor.kill(order.actor, order.reason)

    def finished(self, last_word: JobFinished) -> None:
        self._last_word = last_word

    def warned(self, text: str) -> None:
        log.warning("%s", text)

    def registry_silent(self) -> None:
        """Nobody is heard then, which is no child's fault."""
        self._supervisor.forgive()

    def registry_takes_no_link(self, reason: str) -> None:
        """That is its own fault, if it lives and is not just being started."""
        registry = next(child for child in self._supervisor.children() if child["role"] == REGISTRY)
        if registry["state"] == State.READY.value:
            self._supervisor.kill(registry["actor"], f"stuck: it takes no link: {reason}")

    def failed(self, error: BaseException) -> None:
        """Without a link every child would be taken for silent: the job ends with the true reason."""
        self._end(1, f"the supervisor's link to its registry failed: {type(error).__name__}: {error}")

    # ---- what happens

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "stopping":
            self._registry.run_over("the run is over")
        if event["event"] != "exited":
            return
        actor, incarnation, reason = event["actor"], event["incarnation"], event["reason"]
        self._registry.exited(incarnation, reason)
        if event["outcome"] != LifeOutcome.ABNORMAL.value:
            return
        if event["exit_code"] == MISTAKE and not self._served_simulator(actor, incarnation):
            self._end(MISTAKE, f"{actor}: {reason}")
        elif self._starts.ended(actor, incarnation, reason):
            self._end(1, f"{actor} ended {MOST_IN_VAIN} times in a row before it was ready: {reason}")

    def _served_simulator(self, actor: str, incarnation: str) -> bool:
        """Its settings were right when it attached: somebody who attaches under its name ends it, and not the job."""
        return self._starts.is_serving(actor, incarnation) and any(
            child["actor"] == actor and child["role"] == SIMULATOR for child in self._supervisor.children())

    def _end(self, exit_code: int, reason: str) -> None:
        """The first reason for which no restart would help is how the job ended."""
        if self._verdict is None:
            self._verdict = Outcome(exit_code, reason)
            self._stop(reason)

    # ---- the end

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, *hang_up()):
            loop.add_signal_handler(number, self._asked_to_stop, signal.Signals(number).name)

    def _asked_to_stop(self, name: str) -> None:
        """First the controller finishes and saves the step in hand; a second signal stops everything at once."""
        controller = next((child for child in self._supervisor.children() if child["role"] == CONTROLLER), None)
        if self._stopping is not None or controller is None or controller["state"] != State.READY.value:
            # before it is ready the controller has no step in hand, and its own signal would kill it
            self._stop(f"stopped at once by {name}")
            return
        self._observer.notice(f"{name}: finishing the step in hand; again to stop at once")
        os.kill(controller["pid"], DRAIN_SIGNAL)
        self._stopping = asyncio.get_running_loop().create_task(self._stop_after_drain(name))

    async def _stop_after_drain(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.supervisor.drain_s
        while loop.time() < until:
            await asyncio.sleep(MUTE_LOOK_S)
            mute = await self._registry.mute_role(MUTE_S)
            if mute and self._last_word is None:  # a controller that is through leaves before its process ends
                reason = f"no actor of role {mute} answers, so the step in hand can not be finished"
                break
        else:
            reason = "the step in hand took longer than supervisor.drain_s"
        await self._supervisor.stop(f"{name}, and {reason}")

    def _stop(self, reason: str) -> None:
        self._stopping = asyncio.get_running_loop().create_task(self._supervisor.stop(reason))

    def _outcome(self, kind: EndKind, reason: str) -> Outcome:
        if self._verdict is not None:
            return self._verdict
        if kind is EndKind.FINISHED and self._last_word is not None:
            return Outcome(self._last_word.exit_code, self._last_word.reason)
        return Outcome(0 if kind is EndKind.STOPPED else 1, reason)
