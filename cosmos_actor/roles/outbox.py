"""Versions on their way out of the policy: it goes on training while a thread publishes what it had.

    snapshot ──> waiting ──(thread: hash, put)──> published
                    ^ a newer one takes its place, and it is never published

At most one version waits and one is being published. The newest that was published keeps its snapshot until its memory
is needed, so that it can be put right where it lies damaged on the bulk plane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version


class Snapshot(Protocol):
    """See `trainer.snapshots.Snapshot`, and `trainer.device_snapshots.DeviceSnapshot` for one that stays on a GPU."""

    def arrays(self) -> Mapping[str, Any]: ...

    def release(self) -> None: ...


class Letter(NamedTuple):
    """One version and the memory that it lies in."""

    version: Version
    snapshot: Snapshot


Publish = Callable[[Version, Any], Manifest]


class Outbox:
    """Versions leave in the order in which they came, each whole or not at all. `thread` is where they leave."""

    def __init__(self, publish: Publish) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self.replaced = 0
        """Versions that a newer one overtook while they waited."""
        self._publish = publish
        self._lock = threading.Lock()
        self._waiting: Letter | None = None
        self._sent: Letter | None = None
        self._sending = False
        self._lives = 0

    def make_room(self) -> None:
        """Have at most one snapshot in use: to be called before the next is taken."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.snapshot.release()
                self._waiting = None
                self.replaced += 1
            elif self._sending and self._sent is not None:
                self._sent.snapshot.release()
                self._sent = None

    def offer(self, version: Version, snapshot: Snapshot) -> None:
        """This is the next to leave."""
        with self._lock:
            self._waiting = Letter(version, snapshot)

    def clear(self) -> None:
        """Another life begins: what waits is not published, and nothing that was is put right any more."""
        with self._lock:
            self._lives += 1
            for letter in (self._waiting, self._sent):
                if letter is not None:
                    letter.snapshot.release()
            self._waiting = self._sent = None

    def send(self) -> Manifest | None:
        """Publish what waits; None when nothing does. In `thread`. Raises what publishing does."""
        with self._lock:
            letter, self._waiting, life = self._waiting, None, self._lives
            self._sending = letter is not None
        if letter is None:
            return None
        published = False
        try:
            manifest = self._publish(letter.version, letter.snapshot.arrays())
            published = True
            return manifest
        finally:
            with self._lock:
                self._sending = False
                old: Letter | None = letter
                if published and life == self._lives:
                    old, self._sent = self._sent, letter
                if old is not None:
                    old.snapshot.release()

    def with_newest(self, use: Callable[[Version, Mapping[str, Any]], Any]) -> Any:
        """`use` of the newest version that was published, if its memory is still its own; else None. In `thread`."""
        with self._lock:
            letter, self._sent, life = self._sent, None, self._lives
        if letter is None:
            return None
        try:
            return use(letter.version, letter.snapshot.arrays())
        finally:
            with self._lock:
                if life == self._lives:
                    self._sent = letter
                else:
                    letter.snapshot.release()

    def close(self) -> None:
        """Nothing more leaves; what is being published is not waited for."""
        self.thread.shutdown(wait=False, cancel_futures=True)
