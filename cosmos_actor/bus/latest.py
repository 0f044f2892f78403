"""State channels: the latest value of a topic wins, and what was skipped is counted. Pure.

One value per topic is under way at a time, so that a slow reader makes values be skipped, not queued.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple


class LatestOutbox:
    """Per topic: the newest value and the revision that the peer has confirmed.

        publish -> under way -> confirmed; values published meanwhile: only the last of them goes next
    """

    def __init__(self, max_topics: int) -> None:
        self.skipped = 0
        self._max_topics = max_topics
        self._newest: Dict[str, Tuple[int, Any]] = {}
        self._under_way: Dict[str, int] = {}
        self._confirmed: Dict[str, int] = {}
        self._seen_waiting: Dict[str, int] = {}

    def publish(self, topic: str, value: Any) -> Optional[Tuple[int, Any]]:
        """(revision, value) to send now, or None while another is under way. OverflowError: too many topics."""
        revision = self._newest[topic][0] + 1 if topic in self._newest else 1
        if revision == 1 and len(self._newest) >= self._max_topics:
            raise OverflowError(topic)
        waiting = revision > 1 and self._newest[topic][0] > self._under_way.get(topic, self._confirmed.get(topic, 0))
        self.skipped += int(waiting)
        self._newest[topic] = (revision, value)
        return self._next(topic)

    def confirm(self, topic: str, revision: int) -> Optional[Tuple[int, Any]]:
        """The peer handled it; returns the next (revision, value) to send, if there is a newer one.

        A topic that was never published is not kept: it is the peer's word alone.
        """
        if topic not in self._newest:
            return None
        if self._under_way.get(topic) == revision:
            del self._under_way[topic]
        self._confirmed[topic] = max(revision, self._confirmed.get(topic, 0))
        return self._next(topic)

    def again(self) -> List[Tuple[str, int, Any]]:
        """(topic, revision, value) of everything unconfirmed, for a new wire."""
        self._under_way.clear()
        out = []
        for topic in self._newest:
            ready = self._next(topic)
            if ready is not None:
                out.append((topic, *ready))
        return out

    def overdue(self) -> List[Tuple[int, Any]]:
        """The newest (revision, value) of each topic that was under way at the call before this one: it may be lost."""
        late = [topic for topic, revision in self._under_way.items() if self._seen_waiting.get(topic) == revision]
        for topic in late:
            del self._under_way[topic]
        ready = [self._next(topic) for topic in late]
        self._seen_waiting = dict(self._under_way)
        return [value for value in ready if value is not None]

    def _next(self, topic: str) -> Optional[Tuple[int, Any]]:
        if topic not in self._newest or topic in self._under_way:
            return None
        revision, value = self._newest[topic]
        if revision <= self._confirmed.get(topic, 0):
            return None
        self._under_way[topic] = revision
        return revision, value

    @property
    def unconfirmed(self) -> int:
        return sum(revision > self._confirmed.get(topic, 0) for topic, (revision, _) in self._newest.items())


class LatestInbox:
    """Revisions of a topic only grow here; an older or repeated one is told apart."""

    def __init__(self) -> None:
        self.skipped = 0
        self._seen: Dict[str, int] = {}

    def accept(self, topic: str, revision: int) -> bool:
        """Whether this is news. Revisions that were passed over are counted."""
        seen = self._seen.get(topic, 0)
        if revision <= seen:
            return False
        self.skipped += revision - seen - 1
        self._seen[topic] = revision
        return True

    @property
    def topics(self) -> int:
        return len(self._seen)
