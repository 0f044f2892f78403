"""The supervisor's end of its link to the registry: what it says there, what it hears, and a registry that is mute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cosmos_actor.actors import stacks
from cosmos_actor.actors.messages import (
    PROCESSES_TOPIC,
    AskMute,
    DumpStacks,
    Heard,
    JobFinished,
    KillOrder,
    Processes,
    StacksDumped,
    Warned,
)
from cosmos_actor.actors.role_names import REGISTRY
from cosmos_actor.bus import Bus, BusError, Link

TELL_EVERY_S = 1.0
"""How old the registry's view of the processes may be, when none began or ended."""
DIAL_DEADLINE_S = 5.0
"""A registry that takes no link for so long, while its process lives, is taken for stuck."""
DIAL_PAUSE_S = 0.2
"""Between two attempts. Without it a registry that refuses us is asked thousands of times a second."""
EXITS_KEPT, REASON_CHARACTERS = 256, 500
"""Ends of lives that a registry is told of. More would outgrow a message; older ones are in its journal."""
MUTE_DEADLINE_S = 1.0
"""How long a stop waits for the answer; without one it goes on as if nobody were mute."""


class Listener(Protocol):
    """Who owns the processes. Called on the loop."""

    def heard(self, word: Heard) -> None: ...
    def kill(self, order: KillOrder) -> None: ...
    def finished(self, last_word: JobFinished) -> None: ...
    def warned(self, text: str) -> None: ...
    def registry_silent(self) -> None:
        """Nobody is heard at this moment; told again and again, and once more when the registry is back."""
        ...

    def registry_takes_no_link(self, reason: str) -> None:
        """For DIAL_DEADLINE_S a link could not be made."""
        ...

    def failed(self, error: BaseException) -> None:
        """A fault of this link itself: it is kept no more."""
        ...


class RegistryLink:
    """Kept up as long as it is open; every registry that comes is told all it has to know."""

    def __init__(self, bus: Bus, address: str, listener: Listener, children: Callable[[], list[dict[str, Any]]],
                 stacks_file: Path) -> None:
        self._bus, self._address, self._listener, self._children = bus, address, listener, children
        self._stacks_file = stacks_file
        self._exited: dict[str, str] = {}
        self._run_over = ""
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        bus.serve_event(Heard, lambda word, link: listener.heard(word))
        bus.serve_event(KillOrder, lambda order, link: listener.kill(order))
        bus.serve_event(Warned, lambda warned, link: listener.warned(warned.text))
        bus.serve(DumpStacks, self._dump)
        bus.serve(JobFinished, lambda last_word, link: listener.finished(last_word))

    async def start(self) -> None:
        await self._bus.start(None)
        self._task = asyncio.get_running_loop().create_task(self._keep())
        self._task.add_done_callback(self._ended)

    def exited(self, incarnation: str, reason: str) -> None:
        """A life has ended."""
        self._exited[incarnation] = reason[:REASON_CHARACTERS]
        while len(self._exited) > EXITS_KEPT:
            self._exited.pop(next(iter(self._exited)))
        self.tell()

    def run_over(self, reason: str) -> None:
        self._run_over = reason
        self.tell()

    def tell(self) -> None:
        """The newest of it, to the registry and to the next one."""
        self._bus.publish_state(PROCESSES_TOPIC, Processes(self._children(), dict(self._exited), self._run_over))

    async def mute_role(self, seconds: float) -> str:
        """A role that has not been heard of for so long; empty also when nobody can say."""
        if self._link is None or self._link.lost is not None:
            return ""
        try:
            return str((await self._link.call(AskMute(seconds), deadline_s=MUTE_DEADLINE_S)).role)
        except BusError:
            return ""

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await self._bus.close(drain_s=0.5)

    async def _keep(self) -> None:
        while True:
            self.tell()
            if self._link is None or self._link.lost is not None:
                await self._dial()
            elif not self._link.up:
                self._listener.registry_silent()
            await asyncio.sleep(DIAL_PAUSE_S if self._link is None or self._link.lost is not None else TELL_EVERY_S)

    async def _dial(self) -> None:
        """One attempt; whoever waits for heartbeats is told meanwhile that none can come."""
        dialling = asyncio.ensure_future(self._bus.connect(self._address, role=REGISTRY, deadline_s=DIAL_DEADLINE_S))
        try:
            while not dialling.done():
                self._listener.registry_silent()
                await asyncio.wait([dialling], timeout=TELL_EVERY_S)
            self._link = dialling.result()
            self._listener.registry_silent()
        except BusError as error:
            self._listener.registry_takes_no_link(str(error))
        finally:
            dialling.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.failed(error)

    def _dump(self, order: DumpStacks, link: Link) -> StacksDumped:
        try:
            stacks.own(self._stacks_file, order.title)
        except OSError:
            return StacksDumped(False)  # a full disk may well be why nothing gets done
        return StacksDumped(True)
