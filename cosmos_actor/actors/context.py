"""The one seam through which an actor's inputs reach its role: messages, clock, random numbers, weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import numpy as np

from cosmos_actor.actors.worker import Worker
from cosmos_actor.bus.identity import Identity


class ActorClock(Protocol):
    """Readings of time. `monotonic` for waits and durations, `wall` only for what a person reads."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """This machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class AskedToExit(Exception):
    """A role's code called sys.exit, as some graders and parsers do: a failure of that call."""


class WeightSource(Protocol):
    """Brings a published version's tensors, verified, or raises and brings nothing."""

    async def pull(self, manifest: Any, deadline_s: float) -> Mapping[str, np.ndarray]: ...


async def _nowhere(message: Any) -> None:
    """Where events go for an actor without a controller."""


class Context:
    """What a role may know and do. Everything that could differ between two runs comes through here.

    - messages: the runtime calls the methods that the role marked with `handles`;
    - clock: `context.clock`;
    - random numbers: `context.rng(name)`, a stream per (run seed, actor, name);
    - weights: `context.weights.pull`.

    `context.emit(message)` tells the controller something it did not ask for, as an ordered event.
    """

    def __init__(self, identity: Identity, settings: Any, *, seed: int, clock: ActorClock, worker: Worker,
                 weights: WeightSource | None = None, bulk_store: Any = None,
                 emit: Callable[[Any], Awaitable[None]] = _nowhere) -> None:
        self.identity = identity
        self.settings = settings
        self.clock = clock
        self.weights = weights
        self.bulk_store = bulk_store
        self.emit = emit
        self.progress = 0
        self.busy_label = ""
        self.busy_seconds = 0.0
        self._seed = seed
        self._worker = worker

    def rng(self, name: str) -> np.random.Generator:
        """A fresh generator whose stream depends on the run's seed, this actor's name and `name` alone."""
        key = f"{self._seed}/{self.identity.actor}/{name}".encode()
        return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:8], "little"))

    async def compute(self, label: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function` in the worker and count it as progress and as busy time under `label`."""
        return await self._worker.run(self._timed, label, function, arguments)

    def _timed(self, label: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self.busy_label, begun = label, self.clock.monotonic()
        try:
            return function(*arguments)
        except SystemExit as error:  # it would end the actor, and the next one that takes the work, and so on
            raise AskedToExit(f"{label} called sys.exit({error.code!r})") from error
        finally:
            self.busy_label = ""
            self.busy_seconds += self.clock.monotonic() - begun
            self.progress += 1
