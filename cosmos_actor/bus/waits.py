"""What an actor has under way at its peers, and what it holds of theirs: the bus's half of "who waits for whom"."""

from __future__ import annotations

from typing import Any, Dict, List

import msgpack  # type: ignore[import-untyped]

from .envelope import CALL, CHANNELS, EVENT, WORK

NAME_BYTES = 512
"""Enough of a message to read its schema's name; the rest may be a megabyte."""


def under_way(bus: Any) -> List[Dict[str, Any]]:
    """One object for each peer and channel with a message of ours that is not done, the oldest first.

    on, channel, message (schema of the oldest), count, for_s (age of the oldest), up (a wire carries the link now).
    """
    now = bus.clock.now()
    found = []
    for actor, link in bus.links.items():
        for channel in (WORK, CALL, EVENT):
            oldest = link.out.outboxes[channel].oldest()
            if oldest is not None:
                found.append({
                    "on": actor, "channel": CHANNELS[channel], "message": schema_of(oldest.packed.body),
                    "count": len(link.out.outboxes[channel]), "for_s": round(now - oldest.since, 3), "up": link.up,
                })
    return sorted(found, key=lambda entry: -entry["for_s"])


def held(bus: Any) -> Dict[str, int]:
    """Peer -> work and calls of it that came and are not answered, whether their handler has begun or not."""
    counts = {actor: sum(link.incoming.inboxes[channel].running for channel in (WORK, CALL))
              for actor, link in bus.links.items()}
    return {actor: count for actor, count in counts.items() if count}


def schema_of(body: bytes) -> str:
    """The schema's name of a packed message."""
    unpacker = msgpack.Unpacker(max_buffer_size=NAME_BYTES)
    unpacker.feed(bytes(body[:NAME_BYTES]))
    unpacker.read_array_header()
    return str(unpacker.unpack())
