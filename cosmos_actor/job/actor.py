"""One actor as a process: `python -m cosmos_actor.job.actor --role ROLE --actor NAME --connect HEAD --key FILE`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from cosmos_actor import death
from cosmos_actor.actors import event_loop, log_stream, stacks
from cosmos_actor.actors.context import SystemClock
from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.messages import READY
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.actors.runtime import HEAD_BACK_S, ActorRuntime
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import Identity, KeyRing, PeerRefused, new_incarnation
from cosmos_actor.bus.handshake import KEY_NOT_LISTED, WRONG_SERVER_KEY
from cosmos_actor.job.assembly import ask_settings, gateway, make_bus, weight_source
from cosmos_actor.job.last_line import exit_code_of
from cosmos_actor.job.rejoin import LeaveAsked, live
from cosmos_actor.job.roles import CONTROL_CLASSES, CONTROLLER, build_role
from cosmos_actor.recipes.resolved import load_resolved
from cosmos_actor.recipes.settings import RunSettings

LINKED_WITHIN_S = 20.0
"""A joined actor that the controller has not reached by then says so: most often its address is the wrong one."""
LOOK_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 asked to end, 1 failed, 2 a mistake that a person can put right."""
    death.install()
    log_stream.install()
    options = _parser().parse_args(arguments)
    return run(options.role, options.actor, options.connect, options.key, listen=options.listen,
               listener=options.listener,
               incarnation=os.environ.get(death.INCARNATION) or new_incarnation(), run_dir=options.run_dir,
               takes_turns=options.turns)


def run(role: str, actor: str, head: str, key: Path, *, listen: str, incarnation: str, run_dir: Path | None,
        listener: int | None = None, joined: bool = False, rejoin_s: float = 0.0, takes_turns: bool = False) -> int:
    """Live one actor's life, or several if it joined by itself and may join again for `rejoin_s`; the exit code."""
    def life() -> int:
        keys = KeyRing.load(key)
        if keys.role != role:
            raise UserError(f"{key} is the key of role {keys.role}, not of {role}", setting="--key")
        identity = Identity(keys.run_id, role, actor, incarnation)
        stacks.install(RunPaths(run_dir).stacks(actor, incarnation) if run_dir else None)
        settings = load_resolved(RunPaths(run_dir).configuration) if run_dir else _of_head(identity, keys, head, key)
        if follows_a_leader():
            return _follow(settings)
        if role == CONTROLLER:
            return _control(identity, keys, settings, head, listen, run_dir, takes_turns)
        asked = LeaveAsked()

        def serve(life: Identity) -> int:
            newest = settings if life is identity or run_dir else _of_head(life, keys, head, key)
            return event_loop.run(_serve(life, keys, newest, head, listen, listener, joined, takes_turns, asked))

        return live(serve, identity, rejoin_s, asked)

    return exit_code_of(life)


def _of_head(identity: Identity, keys: KeyRing, head: str, key: Path) -> RunSettings:
    """The settings of the run behind `head`. Raises UserError when the key is of another one."""
    try:
        return ask_settings(identity, keys, head)
    except PeerRefused as error:
        if not error.reason.startswith((KEY_NOT_LISTED, WRONG_SERVER_KEY)):
            raise
        raise UserError(f"{key} is not of the run behind {head}: {error.reason}", setting="--key") from error


def follows_a_leader() -> bool:
    """True in every rank of an actor but the first: only that one is on the bus."""
    return int(os.environ.get("RANK", "0")) > 0


def _follow(settings: RunSettings) -> int:
    from cosmos_actor.trainer.ranks import follow

    follow(settings.policy, temperature=settings.rollout.logprob_temperature)
    return 0


def _control(identity: Identity, keys: KeyRing, settings: RunSettings, head: str, listen: str,
             run_dir: Path | None, takes_turns: bool) -> int:
    from cosmos_actor.job.controller import ControllerProcess

    if run_dir is None:
        raise UserError("the controller needs the run directory", setting="--run-dir")
    process = ControllerProcess(
        lambda: make_bus(identity, keys, settings, resolve_bulk=False), settings, RunPaths(run_dir),
        takes_turns=takes_turns)
    return process.run(head, listen)


async def _serve(identity: Identity, keys: KeyRing, settings: RunSettings, head: str, listen: str,
                 listener: int | None, joined: bool, takes_turns: bool, asked: LeaveAsked) -> int:
    bus = make_bus(identity, keys, settings, listener=listener)
    runtime = ActorRuntime(bus, lambda context: build_role(identity.role, context), settings, settings.run.seed,
                           worker=ThreadWorker(identity.actor), clock=SystemClock(), joined=joined,
                           takes_turns=takes_turns,
                           weights=weight_source(bus, settings), simulators=gateway(bus, settings),
                           blocked_s=settings.supervisor.stuck_s,
                           head_back_s=HEAD_BACK_S if joined else settings.supervisor.start_s)
    telling = None
    try:
        await runtime.start(head, listen)
        runtime.begin()
        _leave_on_signals(runtime, joined, asked)
        telling = asyncio.get_running_loop().create_task(_tell_when_joined(runtime)) if joined else None
        await runtime.until_stopped()
        if joined and runtime.asked_to_end:
            _say(f"{identity.actor}: asked to end: {runtime.asked_to_end}")
    finally:
        if telling is not None:
            telling.cancel()
        await runtime.close()
    return 0


async def _tell_when_joined(runtime: ActorRuntime) -> None:
    """For the person who started it: that the job can use it now, or who has not come to it."""
    bus, begun, told = runtime.bus, time.monotonic(), False
    while not (linked := any(link.peer.role == CONTROLLER for link in bus.links.values())) or runtime.state != READY:
        if not linked and not told and time.monotonic() - begun > LINKED_WITHIN_S:
            told = True
            _say(f"{bus.identity.actor}: no controller has come to {bus.address} within {LINKED_WITHIN_S:g} s; if that "
                 "can not be reached from the job's host, name another address with --host")
        await asyncio.sleep(LOOK_S)
    _say(f"{bus.identity.actor}: joined {bus.identity.run_id}, ready for work")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _leave_on_signals(runtime: ActorRuntime, joined: bool, asked: LeaveAsked) -> None:
    """A supervised actor ends at once, since its supervisor knows; a joined one first finishes what it holds."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        asked.note()
        if joined:
            tasks.append(loop.create_task(runtime.leave("asked by a signal")))
        else:
            runtime.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if asked:  # while this life was still joining
        on_signal()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cosmos_actor.job.actor", description=__doc__)
    parser.add_argument("--role", required=True, choices=[CONTROLLER, *CONTROL_CLASSES])
    parser.add_argument("--actor", required=True, help="name in the run, such as rollout-0")
    parser.add_argument("--connect", required=True, help="address of the run's head")
    parser.add_argument("--key", required=True, type=Path, help="this role's key file")
    parser.add_argument("--listen", default="tcp://127.0.0.1:0", help="where other actors reach this one")
    parser.add_argument("--listener", type=int, help="descriptor of a socket that listens there already")
    parser.add_argument("--turns", action="store_true", help="policy and rollouts have their GPU in turn")
    parser.add_argument("--run-dir", type=Path, help="run directory, for roles that write there")
    return parser


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # nothing above this: the log gets the whole story, and the process ends whatever threads it has
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a worker in the middle of a long computation must not hold a process that is done
