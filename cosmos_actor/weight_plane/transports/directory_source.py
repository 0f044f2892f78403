"""The two ends of a job that passes its versions through a directory."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.transports.directory import Taken, VersionDirectory
from cosmos_actor.weight_plane.transports.file_systems import SETTING, VersionMissing
from cosmos_actor.weight_plane.transports.outcome import Outcome
from cosmos_actor.weight_plane.transports.safetensors_file import FileDamaged
from cosmos_actor.weight_plane.version import NewestTaken, Version

log = logging.getLogger(__name__)

APPEARS_WITHIN_S = 10.0
"""A network file system shows a new file to another host seconds later; one that is not there by then is not coming."""
LOOK_AGAIN_S = 0.25
READ_AT_MOST = 2
"""A file that is cut off is read once more: it may have been on its way. Whoever pulls decides about wrong bytes."""

Publish = Callable[[Version, Any], Manifest]
Arrays = Callable[[Any], Mapping[str, np.ndarray]]


def written_too(publish: Publish, url: str, run_id: str, keep: int,
                arrays: Arrays = lambda tensors: tensors) -> Publish:
    """`publish`, with each version at `url` before it is announced: who hears of it finds it there. No URL: as it is.

    `arrays`: what is published, as arrays on the host.

    Raises what `VersionDirectory.write` raises, also after the version is on the bulk plane: nobody hears of it then.
    """
    if not url:
        return publish
    directory = VersionDirectory(url, run_id, keep=keep)

    def both(version: Version, tensors: Any) -> Manifest:
        manifest = publish(version, tensors)
        directory.write(version, arrays(tensors))
        return manifest

    return both


class DirectorySource:
    """`pull` gives the version that a manifest announces, as the directory has it: with that digest, or not at all.

    The same promises as `WeightSubscriber.pull`; where the bytes lie on the bulk plane does not matter to it.
    """

    def __init__(self, directory: VersionDirectory, run_id: str, say: Callable[[str], None] = log.info) -> None:
        self._directory, self._say = directory, say
        self._taken = NewestTaken(run_id, "the reader")
        self._one_at_a_time = asyncio.Lock()
        self._counts = Counter({"pulled": 0, "pulled_bytes": 0, "refused": 0})
        self._said = False

    @property
    def newest(self) -> Version | None:
        return self._taken.newest

    async def pull(self, manifest: Manifest, deadline_s: float) -> dict[str, np.ndarray]:
        """Name -> tensor in private, writable memory; bfloat16 as uint16."""
        if not self._said:
            self._say(f"weights come by directory: weights.transport asks for it ({self._directory.url})")
            self._said = True
        async with self._one_at_a_time:
            try:
                self._taken.check(manifest.version)
                taken = await self._in_thread(manifest, deadline_s)
            except BaseException:
                self._counts["refused"] += 1
                raise
            self._taken.take(manifest.version)
        self._counts["pulled"] += 1
        self._counts["pulled_bytes"] += sum(tensor.nbytes for tensor in taken.tensors.values())
        return taken.tensors

    def doubt(self, version: Version) -> None:
        """See `WeightSubscriber.doubt`."""
        self._taken.doubt(version)

    def statistics(self) -> dict[str, Any]:
        newest = None if self.newest is None else str(self.newest)
        return {**self._counts, "newest": newest, "transport": "directory", "reason": "weights.transport asks for it"}

    async def _in_thread(self, manifest: Manifest, deadline_s: float) -> Taken:
        """On a daemon thread: a file system that hangs must not hang the process's end as well."""
        outcome: Outcome[Taken] = Outcome()
        over = threading.Event()

        def run() -> None:
            try:
                outcome.bring(self._read(manifest, over))
            except Exception as error:  # told to who waits
                outcome.fail(error)

        threading.Thread(target=run, name="weights-directory", daemon=True).start()
        try:
            if await outcome.wait(deadline_s):
                return outcome.take()
        finally:
            over.set()
            outcome.leave()
        raise DeadlineExceeded(f"version {manifest.version} was not read out of {self._directory.url} within"
                               f" {deadline_s:g} s", setting=SETTING)

    def _read(self, manifest: Manifest, over: threading.Event) -> Taken:
        looks, reads = int(APPEARS_WITHIN_S / LOOK_AGAIN_S), READ_AT_MOST
        while True:
            try:
                return self._directory.read(manifest.version, manifest.digest)
            except VersionMissing:
                looks -= 1
                if looks <= 0 or over.wait(LOOK_AGAIN_S):
                    raise
            except FileDamaged as error:
                reads -= 1
                if not reads:
                    raise
                log.warning("%s; it is read once more", error)
