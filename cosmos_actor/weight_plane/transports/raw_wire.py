"""What the two ends of a raw stream say to each other. Pure: bytes in and out, each side beside the other.

    server -> asker    [greeting]            a challenge, new for each connection
    asker  -> server   [ask]                 bytes of one array, proved with the token of its reference
    server -> asker    [answer][bytes]       what was asked for, or a No with its reason

The token came inside the reference, over the authenticated bus, and is never sent here. A proof holds for one ask of
one connection: what is overheard can not be said again. A connection answers its asks in their order.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from typing import Any

from cosmos_actor.bus.errors import CorruptFrame

MAGIC = b"cosmosW1"
CHALLENGE_BYTES = 16
GREETING_BYTES = len(MAGIC) + CHALLENGE_BYTES
_ASK = struct.Struct("<B3xI16sQQQ")
_ANSWER = struct.Struct("<B3xIQ32s")
PROOF_BYTES = 32
ASK_BYTES = _ASK.size + PROOF_BYTES
ANSWER_BYTES = _ANSWER.size
MAX_TEXT_BYTES = 1024
"""Of anything in an answer but the array's bytes."""
PLAIN, DIGESTED, PAIR, PAIRED, HANDLE, LIVES = 1, 2, 3, 4, 5, 6
"""Asks: bytes; bytes under a keyed digest; a group of two; bytes through it; where the bytes lie on the device; whether
they still do."""
NO, YES = 0, 1
LARGEST = (1 << 62) - 1


@dataclass(frozen=True)
class Ask:
    kind: int
    number: int
    """Of the ask in its connection."""
    arena: bytes
    """16 bytes: which life of which owner."""
    generation: int
    first: int
    """First byte in the array; for PAIR the backend, for PAIRED the bytes of each broadcast, 0: all at once."""
    length: int
    """Bytes."""

    def packed(self) -> bytes:
        return _ASK.pack(self.kind, self.number, self.arena, self.generation, self.first, self.length)


@dataclass(frozen=True)
class Answer:
    status: int
    number: int
    length: int
    """Bytes that follow."""
    digest: bytes


def pack_greeting() -> bytes:
    return MAGIC + os.urandom(CHALLENGE_BYTES)


def unpack_greeting(data: bytes) -> bytes:
    """The challenge. Raises CorruptFrame when somebody else listens there."""
    if not data.startswith(MAGIC):
        raise CorruptFrame("who listens there is no server of raw streams, or of another version", channel="weights")
    return data[len(MAGIC):]


def pack_ask(ask: Ask, token: bytes, challenge: bytes) -> bytes:
    return ask.packed() + proof(ask, token, challenge)


def unpack_ask(data: bytes) -> tuple[Ask, bytes]:
    """(the ask, its proof). Raises CorruptFrame."""
    kind, number, arena, generation, first, length = _ASK.unpack(data[: _ASK.size])
    if kind not in (PLAIN, DIGESTED, PAIR, PAIRED, HANDLE, LIVES) or max(generation, first, length) > LARGEST:
        raise CorruptFrame(f"ask of kind {kind} for bytes {first} + {length}", channel="weights")
    return Ask(kind, number, arena, generation, first, length), data[_ASK.size:]


def pack_answer(ask: Ask, status: int, length: int, digest: bytes) -> bytes:
    return _ANSWER.pack(status, ask.number, length, digest)


def unpack_answer(data: bytes, ask: Ask) -> Answer:
    """Raises CorruptFrame unless this answers `ask`, with as many bytes as were asked for."""
    answer = Answer(*_ANSWER.unpack(data))
    expected = answer.length == ask.length if answer.status == YES and ask.kind in (PLAIN, DIGESTED) else (
        answer.status in (NO, YES) and answer.length <= MAX_TEXT_BYTES)
    if answer.number != ask.number or not expected:
        raise CorruptFrame(f"ask {ask.number} for {ask.length} bytes was answered as ask {answer.number} with"
                           f" {answer.length} (status {answer.status})", channel="weights")
    return answer


def proof(ask: Ask, token: bytes, challenge: bytes) -> bytes:
    """That the asker has the reference."""
    return hmac.digest(token, b"ask" + challenge + ask.packed(), "sha256")


def answer_digest(ask: Ask, token: bytes, challenge: bytes, payload: Any = b"") -> bytes:
    """That the server has the array, and, with its bytes as `payload`, that these are they."""
    mac = hmac.new(token, b"answer" + challenge + ask.packed(), "sha256")
    mac.update(payload)
    return mac.digest()
