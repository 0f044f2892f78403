"""Flats that are used again and again, as many as there may be. Each is busy as long as anybody holds it.

    take(contents) ──> hold ──> another hold for whoever publishes it, and for each reader ──> free
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from cosmos_actor.weight_plane.flat import Allocate, Flat, NoDeviceMemory
from cosmos_actor.weight_plane.flat_layout import BUCKET_BYTES, Contents, arranged

BUFFERS = 2
"""One that others pull from and one for the next version."""


class NoFreeBuffer(RuntimeError):
    """All buffers are in use: whoever asks for a snapshot lets go of one first. Or there is no memory for one."""


class Hold:
    """One reason why a flat is not written over."""

    def __init__(self, flat: Flat, release: Callable[[], None]) -> None:
        self.flat, self._release = flat, release

    def release(self) -> None:
        """A second time changes nothing."""
        release, self._release = self._release, _nothing
        release()


class FlatPool:
    """Invariant: a flat that is given out by `take` is held by nobody else. From any thread."""

    def __init__(self, device: torch.device, *, buffers: int = BUFFERS, bucket_bytes: int = BUCKET_BYTES,
                 allocate: Allocate | None = None) -> None:
        self.device, self.buffers = device, buffers
        self._bucket_bytes, self._allocate = bucket_bytes, allocate
        self._flats: list[Flat | None] = [None] * buffers
        self._holds = [0] * buffers
        self._changed = threading.Condition()

    def take(self, contents: Contents) -> Hold:
        """A free flat for these contents, whatever lies there; it is made anew only when they are others.

        Raises NoFreeBuffer, and ManifestInvalid for contents that can not travel.
        """
        with self._changed:
            number = next((number for number, count in enumerate(self._holds) if not count), None)
            if number is None:
                raise NoFreeBuffer(f"all {self.buffers} snapshots on {self.device} are in use")
            flat = self._flats[number]
            if flat is None or flat.layout.contents != contents:
                self._flats[number] = None  # before the next is made: there may be no room for both
                del flat
                flat = self._flats[number] = self._made(contents)
            return self._held(number, flat)

    def hold(self, flat: Flat) -> Hold:
        """One more, on a flat that is held."""
        with self._changed:
            number = next(number for number, one in enumerate(self._flats) if one is flat)
            return self._held(number, flat)

    def has_room(self) -> bool:
        with self._changed:
            return not all(self._holds)

    def wait_for_room(self, within_s: float) -> bool:
        """Whether one is free after at most so long."""
        until = time.monotonic() + within_s
        with self._changed:
            while all(self._holds):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def _made(self, contents: Contents) -> Flat:
        layout = arranged(contents, self._bucket_bytes)
        try:
            return Flat(layout, self.device, self._allocate)
        except NoDeviceMemory as error:
            raise NoFreeBuffer(f"a snapshot of {layout.nbytes} bytes does not fit beside what else is on {self.device};"
                               " weights.transport = \"shm\" keeps versions in the host's memory") from error

    def _held(self, number: int, flat: Flat) -> Hold:
        self._holds[number] += 1
        return Hold(flat, lambda: self._let_go(number))

    def _let_go(self, number: int) -> None:
        with self._changed:
            self._holds[number] -= 1
            self._changed.notify_all()


def _nothing() -> None:
    """Released already."""
