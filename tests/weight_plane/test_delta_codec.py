"""The codec of deltas: what goes in comes out, and what is damaged raises one typed error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.weight_plane.base import Base
from cosmos_actor.weight_plane.comparing import compare
from cosmos_actor.weight_plane.delta import SPAN_BLOCKS, Delta, changed, pack, unpack
from cosmos_actor.weight_plane.digest import BLOCK_BYTES, raw, tensor_digests, tensor_sums, weights_digest
from cosmos_actor.weight_plane.errors import DeltaInvalid
from cosmos_actor.weight_plane.manifest import DeltaRef
from cosmos_actor.weight_plane.version import Version

pytest.importorskip("zstandard")

KINDS = ["uint8", "int8", "uint16", "float16", "float32", "int32", "float64", "int64", "complex128", "bool"]
Model = dict[str, np.ndarray]


def some_tensor(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(kind)
    if kind == "bool":
        return rng.integers(0, 2, size).astype(bool)
    return rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)


def with_changes(array: np.ndarray, seed: int, share: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = array.copy()
    units = raw(made) if made.dtype == bool else made.view(f"u{min(made.itemsize, 4)}")
    where = rng.random(len(units)) < share
    if made.dtype == bool:
        units[where] ^= 1
    else:
        units[where] += rng.integers(-3, 4, int(where.sum())).astype(units.dtype)
    return made


def delta_of(old: Model, new: Model) -> tuple[np.ndarray, DeltaRef]:
    found = compare(new, {name: raw(array) for name, array in old.items()})
    assert found.digests == tensor_digests(new)
    facts = weights_digest(old), weights_digest(new)
    payload = pack(Delta((0, 1), (0, 2), *facts, found.parts))
    ref = DeltaRef(Version("run", 0, 1), Version("run", 0, 2), *facts, found.changed, None, b"")  # type: ignore[arg-type]
    return payload, ref


def base_of(model: Model) -> Base:
    own = {name: array.copy() for name, array in model.items()}
    return Base(Version("run", 0, 1), own, tensor_sums(own))


def same(one: Model, other: Model) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one | other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3000)), min_size=1, max_size=4), st.integers(0, 99),
       st.sampled_from([0.0, 0.0005, 0.01, 0.1]))
def test_a_delta_makes_the_one_version_the_other_to_the_bit(tensors, seed, share):
    old = {f"t{number}": some_tensor(kind, size, seed) for number, (kind, size) in enumerate(tensors)}
    new = {name: with_changes(array, seed + 1, share) for name, array in old.items()}
    payload, ref = delta_of(old, new)
    base = base_of(old)
    base.apply(ref, payload)
    assert same(base.tensors, new) and base.digest == ref.digest and base.version == ref.version
    assert same(base_of(new).tensors, base.tensors)


def test_a_tensor_of_several_parts_and_gaps_longer_than_a_byte():
    span = SPAN_BLOCKS * BLOCK_BYTES // 2
    old = {"large": np.zeros(3 * span // 2 + 5, np.uint16)}
    new = {"large": old["large"].copy()}
    new["large"][[0, 254, 509, 510, 1_000_000, span - 1, span, len(old["large"]) - 1]] = 65535
    payload, ref = delta_of(old, new)
    base = base_of(old)
    base.apply(ref, payload)
    assert same(base.tensors, new) and payload.nbytes < 800


def test_several_deltas_follow_one_another_and_the_sums_go_along():
    models = [{"w": some_tensor("uint16", 70_000, 0)}]
    for seed in range(3):
        models.append({"w": with_changes(models[-1]["w"], seed, 0.02)})
    base = base_of(models[0])
    for step, (old, new) in enumerate(zip(models, models[1:], strict=False), start=1):
        found = compare(new, {"w": raw(old["w"])})
        facts = weights_digest(old), weights_digest(new)
        ref = DeltaRef(Version("run", 0, step), Version("run", 0, step + 1), *facts, 0, None, b"")  # type: ignore[arg-type]
        base.apply(ref, pack(Delta((0, step), (0, step + 1), *facts, found.parts)))
    assert same(base.tensors, models[-1])


def test_what_a_training_step_changes_takes_about_a_byte_an_element():
    rng = np.random.default_rng(0)
    old = {"w": rng.integers(0, 1 << 16, 1 << 20, np.uint16)}
    new = {"w": old["w"] + (rng.random(1 << 20) < 0.02) * rng.choice([1, -1], 1 << 20).astype(np.uint16)}
    payload, ref = delta_of(old, new)
    assert payload.nbytes < 1.2 * ref.changed < 0.03 * old["w"].nbytes


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_changes_are_found_at_every_place(kind):
    old = some_tensor(kind, 37, 0)
    for place in range(37):
        new = old.copy()
        new[place] ^= 1
        assert changed(old, new).tolist() == [place]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int64", "int8", "bool"])
def test_torch_finds_the_same_changes(kind):
    torch = pytest.importorskip("torch")
    from cosmos_actor.weight_plane.delta import compress
    from cosmos_actor.weight_plane.device_delta import parts_on

    old = {"w": torch.randn(3, 400_000).mul(9).to(getattr(torch, kind)), "none": torch.zeros(0)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["w"].view(-1)[::301] += 1 if kind != "bool" else True
    host = [{name: (tensor.view(torch.uint16) if kind == "bfloat16" and name == "w" else tensor).numpy()
             for name, tensor in model.items()} for model in (old, new)]
    found = compare(host[1], {name: raw(array) for name, array in host[0].items()})
    assert [compress(part) for part in parts_on(old, new)] == found.parts


def test_too_many_changes_are_said_and_nothing_is_made_of_them():
    old = {"w": np.zeros(1 << 20, np.float32)}
    found = compare({"w": old["w"] + 1}, {"w": raw(old["w"])})
    assert found.too_many and found.digests == tensor_digests({"w": old["w"] + 1})


def a_delta() -> tuple[Model, np.ndarray, DeltaRef]:
    old = {"w": some_tensor("uint16", 40_000, 0), "b": some_tensor("float32", 300, 1)}
    new = {"w": with_changes(old["w"], 2, 0.02), "b": with_changes(old["b"], 3, 0.1)}
    return old, *delta_of(old, new)


OLD, PAYLOAD, REF = a_delta()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 8 * PAYLOAD.nbytes - 1))
def test_any_flipped_bit_is_refused_and_the_base_stays(bit):
    damaged = PAYLOAD.copy()
    damaged[bit // 8] ^= np.uint8(1 << bit % 8)
    base = base_of(OLD)
    try:
        base.apply(REF, damaged)
    except DeltaInvalid:
        assert same(base.tensors, OLD) and base.version == REF.base and base.digest == REF.base_digest
    else:  # bits of a compressed frame that mean nothing
        assert base.digest == REF.digest == weights_digest(base.tensors)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(0, PAYLOAD.nbytes - 1).map(lambda end: PAYLOAD[:end]),
                 st.binary(min_size=1, max_size=40).map(
                     lambda more: np.concatenate([PAYLOAD, np.frombuffer(more, np.uint8)])),
                 st.binary(max_size=200).map(lambda data: np.frombuffer(data, np.uint8))))
def test_what_is_cut_off_too_long_or_something_else_is_refused(payload):
    base = base_of(OLD)
    with pytest.raises(DeltaInvalid):
        base.apply(REF, payload)
    assert same(base.tensors, OLD) and base.version == REF.base


PART = unpack(PAYLOAD).parts[0]


def altered(**changes: object) -> np.ndarray:
    delta = unpack(PAYLOAD)
    return pack(type(delta)(**{**vars(delta), **changes}))


@pytest.mark.parametrize(("payload", "what"), [
    (altered(base=(0, 0)), "the delta says that it leads from"),
    (altered(digest="0" * 64), "the delta says that it leads from"),
    (altered(parts=unpack(PAYLOAD).parts[::-1]), "out of order"),
    (altered(parts=[PART, PART]), "out of order"),
    (altered(parts=[PART._replace(unit=1)]), "units of 1 bytes, which no tensor has"),
    (altered(parts=[PART._replace(unit=4)]), "units of 4 bytes, which no tensor has"),
    (altered(parts=[PART._replace(block=SPAN_BLOCKS)]), "can not be|outside its part"),
    (altered(parts=[PART._replace(block=3)]), "can not be"),
    (altered(parts=[PART._replace(block=-SPAN_BLOCKS)]), "can not be"),
    (altered(parts=[PART._replace(count=1 << 40)]), "can not be"),
    (altered(parts=[PART]), "does not lead to its digest"),
    (altered(parts=[]), "does not lead to its digest"),
])
def test_a_delta_that_contradicts_itself_is_refused(payload, what):
    base = base_of(OLD)
    with pytest.raises(DeltaInvalid, match=what):
        base.apply(REF, payload)
    assert same(base.tensors, OLD)


def test_a_delta_of_another_base_is_refused():
    with pytest.raises(DeltaInvalid, match="the delta from 0.1 to 0.2 does not begin with 0.1"):
        base_of({**OLD, "b": np.zeros_like(OLD["b"])}).apply(REF, PAYLOAD)
