"""The registry of a run as a process: `python -m cosmos_actor.job.registry --listen tcp://HOST:PORT --run-dir RUN ...`.

It is the head that every actor dials, keeps status.json, and looks for who is stuck. It owns no process: what it hears
goes to the supervisor, and what that knows comes from there. So it may be killed at any time: the next one reads the
journal of this one (registry.jsonl), is told by the supervisor, and by each actor that comes back to it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_actor import death
from cosmos_actor.actors import event_loop, log_stream, stacks
from cosmos_actor.actors.head import Head
from cosmos_actor.actors.json_lines import ForgivingWriter, JsonLinesWriter, read_json_lines
from cosmos_actor.actors.messages import (
    READY,
    STARTING,
    ActorStatus,
    AskMute,
    DumpStacks,
    Heard,
    JobFinished,
    KillOrder,
    MuteRole,
    Warned,
)
from cosmos_actor.actors.role_names import REGISTRY, REGISTRY_ACTOR, SUPERVISOR, SUPERVISOR_ACTOR
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.bus import BusError, Identity, KeyRing, Link, PeerLost, new_incarnation
from cosmos_actor.job.assembly import make_bus
from cosmos_actor.job.last_line import exit_code_of
from cosmos_actor.job.sentinel import Sentinel
from cosmos_actor.recipes.resolved import load_resolved
from cosmos_actor.recipes.settings import RunSettings

STATUS_PERIOD_S = 1.0
"""Period of status.json, and of this process's own word to the supervisor."""
LOGGER = "cosmos_actor"
"""Whose warnings go to the supervisor: those of the whole package."""
TELL_DEADLINE_S, TELL_PAUSE_S = 5.0, 0.2
"""How long the supervisor may take to hear something, and the pause before it is told once more."""
DUMP_DEADLINE_S = 2.0
"""How long the supervisor may take to write its stacks before the report goes out without them."""
MOST_PENDING = 10_000
"""Words kept for a supervisor that is away. Without a bound a stranger that knocks for ever would fill the memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 asked to end, 1 failed, 2 a mistake that a person can put right."""
    death.install()
    log_stream.install()
    parser = argparse.ArgumentParser(prog="cosmos_actor.job.registry", description=__doc__)
    parser.add_argument("--listen", required=True, help="where actors dial it")
    parser.add_argument("--listener", type=int, help="descriptor of a socket that listens there already")
    parser.add_argument("--key", required=True, type=Path, help="the key file of the registry")
    parser.add_argument("--run-dir", required=True, type=Path, help="run directory")
    options = parser.parse_args(arguments)

    def life() -> int:
        keys, paths = KeyRing.load(options.key), RunPaths(options.run_dir)
        identity = Identity(keys.run_id, REGISTRY, REGISTRY_ACTOR,
                            os.environ.get(death.INCARNATION) or new_incarnation())
        stacks.install(paths.stacks(identity.actor, identity.incarnation))
        settings = load_resolved(paths.configuration)
        event_loop.run(_live(identity, keys, settings, paths, options.listen, options.listener))
        return 0

    return exit_code_of(life)


async def _live(identity: Identity, keys: KeyRing, settings: RunSettings, paths: RunPaths, listen: str,
                listener: int | None) -> None:
    await RegistryProcess(identity, keys, settings, paths, listener).run(listen)


class ToSupervisor:
    """What the supervisor has to hear; of two words about the same thing the newer one. Told until it has heard it."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, Any] = {}
        self._some = asyncio.Event()
        self.dropped = 0
        """Warnings that found no room."""

    def put(self, about: Hashable, message: Any) -> None:
        if isinstance(message, Warned) and len(self._pending) >= MOST_PENDING:
            self.dropped += 1
            return
        self._pending[about] = message
        self._some.set()

    async def tell(self, bus: Any) -> None:
        """Tell it for ever; while it is not there, keep the newest words."""
        while True:
            await self._some.wait()
            link = bus.links.get(SUPERVISOR_ACTOR)
            if link is None or not self._pending:
                self._some.clear()
                continue
            about = next(iter(self._pending))
            message = self._pending.pop(about)
            try:
                receipt = await link.emit(message, deadline_s=TELL_DEADLINE_S)
                await receipt.result(TELL_DEADLINE_S)
            except BusError:  # it is gone, or does not listen
                self._pending.setdefault(about, message)
                await asyncio.sleep(TELL_PAUSE_S)

    def again(self) -> None:
        """The supervisor has come."""
        self._some.set()


class RegistryProcess:
    """Head, sentinel and status.json."""

    def __init__(self, identity: Identity, keys: KeyRing, settings: RunSettings, paths: RunPaths,
                 listener: int | None) -> None:
        self._identity = identity
        self._to_supervisor = ToSupervisor()
        self._come = asyncio.Event()
        bus = self._bus = make_bus(identity, keys, settings, listener=listener)
        events = ForgivingWriter(JsonLinesWriter(paths.events), self._warn)
        known = known_records(paths.registry)
        journal = ForgivingWriter(JsonLinesWriter(paths.registry), self._warn)
        if not known:
            journal.append(header())
        self._head = Head(
            bus, settings.model_dump(mode="json"), settings.run.seed, status_path=paths.root / "status.json",
            events=events, clock=time.time, on_ready=self._announced, on_status=self._status,
            on_finished=self._finished, journal=journal.append, known=known)
        self._sentinel = Sentinel(self._head, paths, lambda: self._head.processes.children, settings.supervisor,
                                  self._kill, events, self._dump_stacks)
        bus.serve(AskMute, lambda message, link: MuteRole(self._sentinel.mute_role(message.seconds)))
        bus.on_link_up(self._link_up)

    async def run(self, listen: str) -> None:
        """Until SIGTERM; then, if the run is over, whoever joined from elsewhere hears of it."""
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        handler = Warnings(self._warn)
        logging.getLogger(LOGGER).addHandler(handler)
        await self._head.start(listen)
        tasks = [loop.create_task(work) for work in (
            self._keep_status(), self._sentinel.run(), self._to_supervisor.tell(self._bus))]
        waiting = loop.create_task(asked.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # a fault of its own ends this process; the next one begins afresh
            task.cancel()
        if self._head.processes.run_over:  # else no goodbye: the run goes on, and finds the next registry
            await self._head.stop_joined(self._head.processes.run_over)
            await self._bus.close(drain_s=1.0)

    # ---- to the supervisor

    def _announced(self, actor: str, incarnation: str) -> None:
        self._heard(Heard(actor, incarnation, STARTING, "", 0.0))

    def _status(self, actor: str, incarnation: str, status: ActorStatus) -> None:
        pause = status.statistics.get("pause", {})
        self._heard(Heard(actor, incarnation, status.state, f"{status.busy_label or status.state} {status.progress}",
                          float(pause.get("left_s", 0.0))))
        self._heard_of_simulators(status)

    def _heard_of_simulators(self, status: ActorStatus) -> None:
        """They have no link to the registry; their driver says who is attached, and as which life of a child."""
        for simulator in status.statistics.get("simulators", []):
            if simulator["life"]:
                self._heard(Heard(simulator["actor"], simulator["life"], READY, str(simulator["steps"]), 0.0))

    def _heard(self, word: Heard) -> None:
        self._to_supervisor.put(("heard", word.actor), word)

    def _kill(self, actor: str, incarnation: str, reason: str) -> None:
        self._to_supervisor.put(("kill", actor), KillOrder(actor, incarnation, reason))

    async def _dump_stacks(self, title: str) -> bool:
        link = self._bus.links.get(SUPERVISOR_ACTOR)
        try:
            return link is not None and bool((await link.call(DumpStacks(title), deadline_s=DUMP_DEADLINE_S)).written)
        except BusError:
            return False  # it stands still itself, and `why` says so

    def _warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._to_supervisor.put(("warned", text), Warned(text))

    async def _finished(self, last_word: JobFinished) -> None:
        """Returns when the supervisor has it: the controller may end then."""
        try:
            await asyncio.wait_for(self._come.wait(), TELL_DEADLINE_S)
            link = self._bus.links[SUPERVISOR_ACTOR]
        except (asyncio.TimeoutError, KeyError):
            raise PeerLost("no supervisor is linked", peer=SUPERVISOR_ACTOR) from None
        await link.call(last_word, deadline_s=TELL_DEADLINE_S)

    def _link_up(self, link: Link) -> None:
        if link.role == SUPERVISOR:
            self._come.set()
            self._to_supervisor.again()

    # ---- status.json

    async def _keep_status(self) -> None:
        writable = True
        while True:
            self._heard(Heard(self._identity.actor, self._identity.incarnation, READY, READY, 0.0))
            try:
                self._head.write_status(self._sentinel.more())
                writable = True
            except OSError as error:  # the run itself may go on; the disk may be free again later
                if writable:
                    self._warn(f"status.json can not be written: {error.strerror}")
                writable = False
            await asyncio.sleep(STATUS_PERIOD_S)


class Warnings(logging.Handler):
    """Hands warnings of this package's loggers on as text."""

    def __init__(self, hand_on: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._hand_on = hand_on

    def emit(self, record: logging.LogRecord) -> None:
        self._hand_on(record.getMessage())


def header() -> dict[str, Any]:
    """The first line of a journal: under which supervisor it was written."""
    return {"supervisor": os.environ.get(death.SUPERVISOR, "")}


def known_records(path: Path) -> Sequence[Mapping[str, Any]]:
    """The journal of this supervisor's registry; that of an earlier life of the run is removed."""
    records, ours = read_json_lines(path, skip_damaged=True), header()
    if ours["supervisor"] and records and records[0] == ours:
        return records
    path.unlink(missing_ok=True)
    return ()


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # nothing above this: the log gets the whole story
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
