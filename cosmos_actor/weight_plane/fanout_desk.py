"""The controller's end of the fan-out: readers ask it whom to take a bucket from. See `fanout_tracker`.

No byte of a bucket comes by here, and nobody depends on it: a reader that gets no answer goes to the publisher.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from cosmos_actor.bus import Bus, Link
from cosmos_actor.weight_plane.fanout_messages import (
    CORRUPT,
    PUBLISHER,
    BucketsDropped,
    BucketSource,
    BucketTaken,
    BucketWanted,
)
from cosmos_actor.weight_plane.fanout_table import Crowd
from cosmos_actor.weight_plane.fanout_tracker import Grant, Tracker

log = logging.getLogger(__name__)

QUESTIONS_AT_ONCE = 64
"""Of one reader; it asks for a few buckets at a time."""


class FanOutDesk:
    """Each question is answered within `patience_s`: with a source, or that there is none yet. Lives on the bus's loop,
    to be made before the bus starts."""

    def __init__(self, bus: Bus, patience_s: float) -> None:
        self._bus, self._patience_s = bus, patience_s
        self._tracker = Tracker(patience_s)
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._deciding = False
        bus.serve(BucketWanted, self._on_wanted, concurrency=QUESTIONS_AT_ONCE)
        bus.serve_event(BucketTaken, self._on_taken)
        bus.serve_event(BucketsDropped, self._on_dropped)
        bus.on_link_down(self._on_link_down)

    def statistics(self) -> dict[str, Any]:
        return self._tracker.statistics()

    def counts(self) -> dict[str, int]:
        """The same flat, for a line of metrics; empty while nobody has asked. From any thread."""
        found = self.statistics()
        nbytes = {f"fan_out/{kind}": found[kind] for kind in ("publisher_bytes", "relay_bytes", "near_bytes")}
        if not any(nbytes.values()):
            return {}
        return {**nbytes, **{f"fan_out/{problem}": count for problem, count in found["problems"].items()},
                **{f"fan_out/corrupt/{relay.partition('/')[0]}": count for relay, count in found["corrupt"].items()}}

    async def _on_wanted(self, wanted: BucketWanted, link: Link) -> BucketSource:
        ticket = self._tracker.want(
            str(link.peer), link.host_id, wanted.bucket, wanted.nbytes, crowd=self._crowd(link, wanted.publisher_host),
            refused=wanted.refused, problem=wanted.problem)
        if wanted.problem == CORRUPT and wanted.refused:
            who = "nobody" if self._tracker.is_banned(wanted.refused[-1]) else "it"
            log.warning("%s got bytes of a weights bucket from %s that are not the manifest's; %s takes%s from it any"
                        " more", link.peer, wanted.refused[-1], who, " any" if who == "nobody" else " none")
        answer = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._decide_soon()
            await asyncio.wait([answer], timeout=self._patience_s)
        finally:
            del self._waiting[ticket]
            self._tracker.withdraw(ticket)
        if not answer.done():
            return BucketSource(False, PUBLISHER, None, self._tracker.silent_s, False)
        grant = answer.result()
        return BucketSource(True, grant.relay, grant.ref, self._tracker.silent_s, grant.keep)

    def _on_taken(self, taken: BucketTaken, link: Link) -> None:
        self._tracker.taken(str(link.peer), link.host_id, taken.bucket, taken.ref, self._now())
        self._decide_soon()

    def _on_dropped(self, dropped: BucketsDropped, link: Link) -> None:
        self._tracker.dropped(str(link.peer), dropped.buckets, publisher_failed=dropped.publisher_failed)
        self._decide_soon()

    def _on_link_down(self, link: Link, reason: str) -> None:
        self._tracker.left(str(link.peer))
        self._decide_soon()

    def _decide_soon(self) -> None:
        """Once for all that has come in this turn of the loop: a decision looks at all that may be answered."""
        if not self._deciding:
            self._deciding = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        for grant in self._tracker.decide(self._now()):
            answer = self._waiting.get(grant.ticket)
            if answer is not None and not answer.done():
                answer.set_result(grant)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._tracker.next_event(self._now())
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._decide)

    def _crowd(self, asker: Link, publisher_host: str) -> Crowd:
        """Who is of the same role and not on the publisher's host: they want what the asker wants."""
        hosts = [link.host_id for link in self._bus.links.values()
                 if link.role == asker.role and link.host_id != publisher_host]
        return Crowd(readers=len(hosts), hosts=len(set(hosts)))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
