"""The one seam through which an actor's inputs reach its role: messages, clock, random numbers, weights."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from cosmos_actor.actors.in_hand import InHand
from cosmos_actor.actors.seeds import seed_of
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


class Panic(Exception):
    """A library failed with an error that Python does not count among the failures, as Rust's panics come through."""


class WeightSource(Protocol):
    """Brings a published version's tensors, verified, or raises and brings nothing."""

    async def pull(self, manifest: Any, deadline_s: float) -> Mapping[str, Any]: ...

    def doubt(self, version: Any) -> None:
        """What was pulled as `version` is not it any more, or was not taken: it may be pulled again."""
        ...


async def _nowhere(message: Any) -> None:
    """Where events go for an actor without a controller."""


def _unheard() -> None:
    """Where pauses are declared by an actor without peers."""


class Context:
    """What a role may know and do. Everything that could differ between two runs comes through here.

    - messages: the runtime calls the methods that the role marked with `handles`;
    - clock: `context.clock`;
    - random numbers: `context.rng(name)`, a stream per (run seed, actor, name);
    - weights: `context.weights.pull`;
    - simulators, for the role that drives them: `context.simulators`, a `simulator_bridge.gateway.Gateway`.

    `context.emit(message)` tells the controller something it did not ask for, as an ordered event. `context.tick()`,
    `busy` and `waiting` say how it gets on, so that long is told apart from stuck.
    """

    def __init__(self, identity: Identity, settings: Any, *, seed: int, clock: ActorClock, worker: Worker,
                 weights: WeightSource | None = None, bulk_store: Any = None, simulators: Any = None,
                 emit: Callable[[Any], Awaitable[None]] = _nowhere,
                 pauses_changed: Callable[[], None] = _unheard, takes_turns: bool = False) -> None:
        """`takes_turns`: its device is another role's in turn, and it is told when (`run.colocated_offload`)."""
        self.takes_turns = takes_turns
        self.identity = identity
        self.settings = settings
        self.clock = clock
        self.weights = weights
        self.bulk_store = bulk_store
        self.simulators = simulators
        self.emit = emit
        self.in_hand = InHand(clock.monotonic)
        self.busy_seconds = 0.0
        self._seed = seed
        self._worker = worker
        self._pauses_changed = pauses_changed

    def rng(self, name: str) -> np.random.Generator:
        """A fresh generator whose stream depends on the run's seed, this actor's name and `name` alone."""
        return np.random.default_rng(seed_of(f"{self._seed}/{self.identity.actor}/{name}", bits=64))

    @property
    def progress(self) -> int:
        """Messages handled, pieces of compute done, and ticks."""
        return self.in_hand.progress

    @property
    def busy_label(self) -> str:
        """What the worker computes now, or nothing."""
        return self.in_hand.label

    async def compute(self, label: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function` in the worker and count it as progress and as busy time under `label`."""
        return await self._worker.run(self._timed, label, function, arguments)

    def tick(self) -> None:
        """A long computation got on; nothing else tells one from a loop without an end. From any thread, cheap."""
        self.in_hand.tick()

    @contextmanager
    def busy(self, label: str, seconds: float) -> Iterator[None]:
        """Be left alone for at most `seconds` (a compile, a checkpoint): nobody takes this actor for stuck or lost.

        It may hold the interpreter lock meanwhile: its peers have been told before this returns.
        """
        try:
            with self.in_hand.pause(label, seconds):
                self._pauses_changed()
                yield
        finally:
            self._pauses_changed()

    def waiting(self, what: str, on: str) -> AbstractContextManager[None]:
        """Name what the code inside waits for, and which actor or role is to bring it, for `cosmos-actor why`."""
        return self.in_hand.waiting(what, on)

    def _timed(self, label: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        begun = self.clock.monotonic()
        try:
            with self.in_hand.compute(label):
                return function(*arguments)
        except SystemExit as error:  # it would end the actor, and the next one that takes the work, and so on
            raise AskedToExit(f"{label} called sys.exit({error.code!r})") from error
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # of a library: nothing above would take it for a failure of this call
            raise Panic(f"{label}: {type(error).__name__}: {error}") from error
        finally:
            self.busy_seconds += self.clock.monotonic() - begun
