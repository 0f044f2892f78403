"""Seeds are those that runs have had ever since, and fit where they are used."""

from __future__ import annotations

import hashlib

import pytest

from cosmos_actor.actors.seeds import seed_of


@pytest.mark.parametrize("bits", [31, 63, 64])
def test_a_seed_is_the_top_of_the_digests_first_bytes_and_fits(bits: int) -> None:
    whole = hashlib.sha256(b"0/train/3/1").digest()
    expected = int.from_bytes(whole[:4] if bits == 31 else whole[:8], "little") >> (0 if bits == 64 else 1)
    assert seed_of("0/train/3/1", bits=bits) == expected < 1 << bits
    assert seed_of("0/train/3/2", bits=bits) != expected
