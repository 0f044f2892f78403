"""The digest tells any two models apart and never two equal ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.weight_plane import digest
from cosmos_actor.weight_plane.digest import stored, tensor_digest, weights_digest


def a_model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.standard_normal((5, 3)).astype(np.float32),
        "norm": np.ones(3, np.float32),
        "half": rng.integers(0, 1 << 16, (2, 2)).astype(np.uint16),
        "scale": np.array(2.5, np.float64),
        "empty": np.zeros((0, 4), np.float32),
    }


def test_the_order_of_insertion_does_not_matter():
    model = a_model()
    assert weights_digest(model) == weights_digest(dict(reversed(model.items())))
    assert weights_digest(model) == weights_digest({name: array.copy() for name, array in model.items()})


CHANGES = {
    "a name": lambda m: {**{("embedding" if n == "embed" else n): a for n, a in m.items()}},
    "two names exchanged": lambda m: {**m, "embed": m["norm"], "norm": m["embed"]},
    "a dtype with the same bytes": lambda m: {**m, "norm": m["norm"].view(np.int32)},
    "a shape with the same bytes": lambda m: {**m, "embed": m["embed"].reshape(3, 5)},
    "a missing tensor": lambda m: {n: a for n, a in m.items() if n != "norm"},
    "a missing empty tensor": lambda m: {n: a for n, a in m.items() if n != "empty"},
    "the shape of an empty tensor": lambda m: {**m, "empty": np.zeros((4, 0), np.float32)},
    "a sign of zero": lambda m: {**m, "scale": np.array(-2.5)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_changes_the_digest(name):
    assert weights_digest(CHANGES[name](a_model())) != weights_digest(a_model())


@given(st.integers(0, 14), st.integers(0, 31))
def test_one_flipped_bit_changes_the_digest(element, bit):
    model = a_model()
    flipped = model["embed"].copy()
    flipped.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert weights_digest({**model, "embed": flipped}) != weights_digest(model)


def test_layout_and_byte_order_in_memory_do_not_matter():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    spread = np.zeros((2, 6), np.float32)
    spread[:, ::2] = array
    for same in (np.asfortranarray(array), array.astype(">f4"), spread[:, ::2]):
        assert tensor_digest(same) == tensor_digest(array)
    assert tensor_digest(np.array(1.0)) != tensor_digest(np.array([1.0]))


def test_bfloat16_is_the_name_of_uint16_storage():
    bits = np.array([1, 2], np.uint16)
    assert stored(bits)[0] == "bfloat16"
    assert tensor_digest(bits) != tensor_digest(bits.view(np.float16))


def test_threads_change_nothing(monkeypatch):
    alone = weights_digest(a_model())
    monkeypatch.setattr(digest, "PARALLEL_BYTES", 0)
    assert weights_digest(a_model()) == alone
