"""The bus's own handshake as the witness: a bus dials the head under a name of its own, asks for the time and leaves.

What an actor would say about its schemas is said here too, so all of them are loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import cosmos_actor.actors.trajectory
import cosmos_actor.bus.bulk.plane
import cosmos_actor.roles.messages
import cosmos_actor.weight_plane.manifest  # noqa: F401  (these four: for their schemas)
from cosmos_actor.actors.messages import AskTime
from cosmos_actor.actors.role_names import REGISTRY
from cosmos_actor.bus import Bus, BusError, DeadlineExceeded, Identity, KeyRing, Limits, Link, PeerRefused, ZmqTransport
from cosmos_actor.bus.identity import host_id
from cosmos_actor.cli.examination.causes import (
    NAME,
    OTHER_ROLE,
    SCHEMAS,
    SERVER_KEY,
    SKEW,
    STUCK,
    Observation,
    bad,
    of_refusal,
)

HEAD_ROLE = REGISTRY
HELLO_S = 1.5
"""A head whose loop turns answers HELLO in milliseconds."""
HANDSHAKE_S = 2.0
"""The whole of it takes ten round trips. Longer, and a stuck head would not be named within 5 s."""
OTHERS_S = 1.0
"""For the look at who listens there instead of the head."""
TIME_S = 1.0
QUESTIONS = 10
"""Round trips; the quickest one says most about the clock, the middle one about the way."""
SKEW_S = 1.0
"""Clocks that differ by more make the order of two hosts' logs a guess."""


async def shake_hands(address: str, identity: Identity, keys: KeyRing) -> AsyncIterator[Observation]:
    """A line a promise of the handshake, until one is broken."""
    bus = Bus(identity, ZmqTransport(), keys, limits=replace(Limits(), handshake_s=HELLO_S))
    await bus.start(None)
    try:
        link = await bus.connect(address, role=HEAD_ROLE, deadline_s=HANDSHAKE_S)
        yield Observation("handshake", "ok", f"{link.peer.actor} of run {identity.run_id} takes {identity.role}; keys, "
                          "protocol and schemas fit")
        for line in await ask_time(link):
            yield line
        yield shared_memory(link)
    except PeerRefused as refusal:
        yield await refused(refusal.reason, address, identity, keys)
    except DeadlineExceeded as error:
        yield bad("handshake", STUCK, error.text)
    finally:
        await bus.close(drain_s=0.0)


async def refused(reason: str, address: str, identity: Identity, keys: KeyRing) -> Observation:
    """The cause; a key that does not fit may be that of another actor of the run."""
    cause = of_refusal(reason)
    if cause is SERVER_KEY:
        role = await who_listens(address, identity, keys)
        if role is not None:
            return bad("handshake", OTHER_ROLE, f"the listener has the key of {role}, not of {HEAD_ROLE}")
        return bad("handshake", cause, f"{reason}; the key file is of run {keys.run_id}")
    says = "the head says, `we` is the head" if cause is SCHEMAS else "the head says"
    named = f" (asked as {identity.actor})" if cause is NAME else ""
    return bad("handshake", cause, f"{says}: {reason}{named}")


async def who_listens(address: str, identity: Identity, keys: KeyRing) -> str | None:
    """The role of this run whose key the listener holds, or None."""
    others = sorted(set(keys.peers) - {HEAD_ROLE})
    found = await asyncio.gather(*(holds_key_of(role, address, identity, keys) for role in others))
    return next((role for role, holds in zip(others, found, strict=True) if holds), None)


async def holds_key_of(role: str, address: str, identity: Identity, keys: KeyRing) -> bool:
    """Whether the listener gets as far as to look at who we are. The actor's name is one that nobody has."""
    bus = Bus(replace(identity, actor=f"doctor?{identity.incarnation[:8]}"), ZmqTransport(), keys)
    await bus.start(None)
    try:
        await bus.connect(address, role=role, deadline_s=OTHERS_S)
        return True
    except PeerRefused as refusal:
        return of_refusal(refusal.reason) is not SERVER_KEY
    except BusError:
        return False
    finally:
        await bus.close(drain_s=0.0)


async def ask_time(link: Link) -> list[Observation]:
    """How far the two clocks are apart, and how long a question takes."""
    trips: list[tuple[float, float]] = []  # (seconds there and back, the head's clock before ours)
    try:
        for _ in range(QUESTIONS):
            wall, begun = time.time(), time.monotonic()
            answer = await link.call(AskTime(), deadline_s=TIME_S)
            took = time.monotonic() - begun
            trips.append((took, answer.wall_s - wall - took / 2))
    except BusError as error:
        return [Observation("clock", "warn", f"the head does not tell its time: {error}", SCHEMAS.cure,
                            SCHEMAS.setting)]
    trips.sort()
    middle = trips[len(trips) // 2][0]
    return [clock(trips[0][1], trips[0][0] / 2),
            Observation("round trip", "ok", f"{1e3 * middle:.2f} ms, the middle of {QUESTIONS} (quickest "
                        f"{1e3 * trips[0][0]:.2f}, slowest {1e3 * trips[-1][0]:.2f})")]


def clock(ahead_s: float, uncertain_s: float) -> Observation:
    value = f"the head's is {abs(ahead_s):.3f} s {'ahead' if ahead_s >= 0 else 'behind'}, ±{uncertain_s:.4f} s"
    if abs(ahead_s) <= SKEW_S:
        return Observation("clock", "ok", value)
    return Observation("clock", "warn", f"{SKEW.name}: {value}", SKEW.cure, SKEW.setting, SKEW)


def shared_memory(link: Link) -> Observation:
    """Whether messages and arrays may go past the network."""
    if link.host_id != host_id():
        return Observation("host_id", "ok", "another host: everything goes over the network")
    if link.sharing.has_lane:
        return Observation("host_id", "ok", "equal: one host; lane and shared memory are in use")
    return Observation("host_id", "warn", "equal, but shared memory could not be opened: messages go over the socket",
                       "see `cosmos-actor doctor` on this host: /proc/PID/fd", "bus.shared_bytes")
