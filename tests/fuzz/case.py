"""One decoder under fuzz: where its input comes from, what it may raise, and how much memory it may take.

The promise: whatever the input is, the decoder returns or raises one of its declared errors, takes no more memory than
`memory_bytes` says, and is through within `CPU_LIMIT_S`.
"""

from __future__ import annotations

import random
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
CPU_LIMIT_S = 5.0
"""Of the processor, not of the clock: a busy machine makes nothing hang. The usual example takes a thousandth of it."""

PER_INPUT_BYTE = 110
"""The costliest msgpack is a list of empty maps: a byte each, and 64 bytes and a place in the list in Python."""

ALWAYS_BYTES = 2 * 1024 * 1024
"""What an example may take whatever its size: texts of errors, a traceback a thousand frames deep, the loop's own."""


opened = ExitStack()
"""What the cases hold open: stores, rings, buses. Closed when the fuzzing ends."""


class Broken(AssertionError):
    """The decoder broke the promise; the text says how."""


class TooMuchMemory(Broken):
    """More than the input and the decoder's declared room explain."""


class Refused(Exception):
    """A layer before the decoder refuses this input already, as it should."""


@dataclass(frozen=True)
class Case:
    """`make` draws one (mutated) input, `decode` is fed with it."""

    name: str
    make: Callable[[random.Random], Any]
    decode: Callable[[Any], None]
    may_raise: tuple[type[Exception], ...]
    memory_bytes: int = 0
    """Declared beyond the input's own: the limit that a setting gives, for decoders that make room for arrays."""

    def try_one(self, choose: random.Random) -> bool:
        """Whether the input was refused. Raises Broken, from what broke it."""
        made = self.make(choose)
        try:
            return self._try(made)
        except TooMuchMemory:  # or what other threads took meanwhile, which is counted as well
            return self._try(made)

    def _try(self, made: Any) -> bool:
        with watched(self.memory_bytes + ALWAYS_BYTES + PER_INPUT_BYTE * size_of(made)):
            try:
                self.decode(made)
            except (Refused, *self.may_raise):
                return True
            except Broken:
                raise
            except Exception as error:  # whatever else comes out is what this looks for
                raise Broken(f"{self.name}: {type(error).__name__}: {str(error)[:200]}") from error
        return False


def until_the_end(held: T) -> T:
    """It is closed when the fuzzing ends."""
    opened.callback(held.close)  # type: ignore[attr-defined]
    return held


def size_of(made: Any) -> int:
    """Bytes of an input, which is bytes, a text, or frames of them."""
    if isinstance(made, (bytes, str)):
        return len(made)
    return sum(map(size_of, made)) if isinstance(made, (list, tuple)) else 64


@contextmanager
def watched(memory_bytes: int) -> Iterator[None]:
    """Raises Broken if the block takes more memory or processor time."""
    previous = signal.signal(signal.SIGVTALRM, _too_long)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    taken = tracemalloc.get_traced_memory()[1] - before
    if taken > memory_bytes:
        raise TooMuchMemory(f"took {taken} bytes of memory, {memory_bytes} are allowed")


def _too_long(*_: object) -> None:
    raise Broken(f"took more than {CPU_LIMIT_S:g} s of the processor")
