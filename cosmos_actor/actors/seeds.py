"""Seeds that differ for each text and are the same everywhere and always, unlike those of Python's own `hash`."""

from __future__ import annotations

import hashlib


def seed_of(text: str, bits: int = 63) -> int:
    """`bits` of the text's SHA-256: 63 fit into a message, 31 into every simulator, 64 into every generator."""
    nbytes = -(-bits // 8)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:nbytes], "little") >> (8 * nbytes - bits)
