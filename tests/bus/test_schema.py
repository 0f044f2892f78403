"""Typed messages: what goes in comes out, and what does not fit is named by schema and field."""
# ruff: noqa: UP006, UP007, UP035, UP045

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus import SchemaError, SchemaMismatch, UnknownSchema, decode, encode, known_schemas, schema_key
from cosmos_actor.bus.codec import DTYPES
from cosmos_actor.bus.schema import Array, Json, array, pack, schema, schema_skew, unpack
from tests.bus.messages import Everything, Inner, Number, Observation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def there_and_back(message: Any) -> Any:
    head, buffers = encode(message)
    return decode(head, [bytes(buffer) for buffer in buffers])


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and equal(vars(one), vars(other))
    return bool(one == other)


ARRAYS = st.builds(
    lambda name, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(DTYPES[name]),
    st.sampled_from(sorted(set(DTYPES) - {"bfloat16"})), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 99),
)


@given(
    st.builds(
        Everything, flag=st.booleans(), number=st.integers(-(2**63), 2**63 - 1), ratio=st.floats(allow_nan=False),
        text=st.text(), blob=st.binary(), maybe=st.none() | st.floats(allow_nan=False), names=st.lists(st.text()),
        table=st.dictionaries(st.text(), st.integers(0, 9)),
        nested=st.lists(st.builds(lambda n: Inner(np.zeros(n, np.float32)), st.integers(0, 3)), max_size=3),
        arrays=st.dictionaries(st.text(max_size=3), ARRAYS, max_size=3),
    )
)
def test_everything_survives(message: Everything) -> None:
    assert equal(there_and_back(message), message)


@given(JSON)
def test_json_survives(value: Any) -> None:
    message = Observation("e", np.zeros((1, 1, 3), np.uint8), np.zeros(1), note=value)
    assert there_and_back(message).note == value


def test_arrays_are_not_copied_and_come_back_read_only() -> None:
    steps = np.arange(5, dtype=np.float32)
    _, buffers = encode(Inner(steps))
    steps[0] = 9.0
    assert np.frombuffer(buffers[0], np.float32)[0] == 9.0
    back = decode(encode(Inner(steps))[0], [bytearray(buffers[0])])
    with pytest.raises(ValueError, match="read-only"):
        back.steps[0] = 1.0


def test_layouts_are_made_contiguous_and_native() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(3, 4, 2).transpose(2, 1, 0)
    message = Observation("e", image, np.arange(6.0)[::2].astype(">f8"))
    back = there_and_back(message)
    assert np.array_equal(back.image, image) and back.joints.tolist() == [0.0, 2.0, 4.0]
    assert back.joints.dtype == np.dtype("float64")


def test_bfloat16_travels_in_uint16_storage() -> None:
    bits = np.arange(4, dtype=np.uint16)
    message = Everything(True, 1, 1.0, "", b"", None, [], {}, [], {}, bits)
    assert there_and_back(message).payload.tolist() == bits.tolist()
    with pytest.raises(SchemaMismatch, match="field payload: expected dtype bfloat16, got float32"):
        encode(Everything(True, 1, 1.0, "", b"", None, [], {}, [], {}, bits.astype(np.float32)))


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (Number("7"), "schema test.number: field value: expected int, got str"),
        (Number(True), "schema test.number: field value: expected int, got bool"),
        (Number(2**70), "schema test.number"),
        (Inner(np.zeros(3)), "schema test.inner: field steps: expected dtype float32, got float64"),
        (Inner(np.zeros((3, 1), np.float32)), "field steps: expected shape ['T'], got [3, 1]"),
        (Inner([1.0]), "field steps: expected an array, got list"),
        (Inner(np.array([None])), "field steps: dtype object can not travel"),
        (Observation("e", np.zeros((2, 2, 4), np.uint8), np.zeros(1)), "field image: expected dim 3 of size 3, got 4"),
        (
            Observation("e", np.zeros((2, 2, 3), np.uint8), np.zeros(2), np.zeros((3, 2))),
            "field limits: expected dim J of size 2, got 3 in shape [3, 2]",
        ),
        (Observation("e", np.zeros((2, 2, 3), np.uint8), np.zeros(2), note={1: 2}), "field note: keys of a Json value"),
        (Observation("e", np.zeros((2, 2, 3), np.uint8), np.zeros(2), note={1}), "field note: expected a Json value"),
        (Everything(True, 1, 1.0, "", b"", None, [1], {}, [], {}), "field names: expected str, got int"),
        (Everything(True, 1, 1.0, "", b"", None, [], {}, [Number(1)], {}), "field nested: expected test.inner, got"),
        (Everything(True, 1, 1.0, "", b"", None, [], {}, [Inner(0)], {}), "field nested.steps: expected an array"),
    ],
)
def test_the_sender_checks_and_names_schema_and_field(message: Any, line: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        encode(message)
    assert line in str(caught.value)


def received(message: Any) -> tuple[list[Any], list[bytes]]:
    head, buffers = encode(message)
    return unpack(head), [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize(
    ("change", "kind", "line"),
    [
        (lambda plain: plain.__setitem__(0, "nobody.knows"), UnknownSchema, "unknown schema 'nobody.knows'"),
        (lambda plain: plain.__setitem__(1, 9), SchemaMismatch, "test.inner: we have version 1, the peer version 9"),
        (lambda plain: plain.__setitem__(2, 9), SchemaMismatch, "test.inner version 1: the peer declares other fields"),
        (lambda plain: plain.__setitem__(3, []), SchemaMismatch, "expected the 1 fields of test.inner"),
        (lambda plain: plain[3].__setitem__(0, [0, "float64", [3]]), SchemaMismatch, "field steps"),
        (lambda plain: plain[3].__setitem__(0, [0, "float32", [4]]), SchemaMismatch, "field steps"),
        (lambda plain: plain[3].__setitem__(0, [0, "float32", [2]]), SchemaMismatch, "frame has 12"),
        (lambda plain: plain[3].__setitem__(0, [0, "float32", [-3]]), SchemaMismatch, "field steps"),
        (lambda plain: plain[3].__setitem__(0, [0, "float32", [2**62, 2**62]]), SchemaMismatch, "field steps"),
        (lambda plain: plain[3].__setitem__(0, [0, "object", [3]]), SchemaMismatch, "malformed"),
        (lambda plain: plain[3].__setitem__(0, [1, "float32", [3]]), SchemaMismatch, "array frame 1 is missing"),
        (lambda plain: plain[3].__setitem__(0, [-1, "test.number", [1, ""]]), SchemaMismatch, "array reference"),
        (lambda plain: plain[3].__setitem__(0, 7), SchemaMismatch, "expected an array slot"),
    ],
)
def test_the_receiver_checks_again(change: Any, kind: type[SchemaError], line: str) -> None:
    plain, buffers = received(Inner(np.zeros(3, np.float32)))
    change(plain)
    with pytest.raises(kind) as caught:
        decode(pack(plain), buffers)
    assert line in str(caught.value)


@given(JSON)
def test_whatever_a_stranger_sends_is_a_schema_error(plain: Any) -> None:
    name, version, fingerprint = schema_key(Everything)
    with pytest.raises(SchemaError):
        decode(pack([name, version, fingerprint, plain]), [])


def test_extensions_and_deep_nesting_are_refused() -> None:
    for data in (b"\xd4\x05x", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc1", b""):
        with pytest.raises(ValueError):
            unpack(data)


# -- declarations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "line"),
    [(complex, "complex"), (Any, "Any"), (Dict[int, str], "Dict[int, str]"), (Optional[set], "set")],
)
def test_a_field_that_can_not_travel_is_refused_where_it_is_declared(hint: Any, line: str) -> None:
    with pytest.raises(SchemaError, match="test.bad field value") as caught:
        schema("test.bad", version=1)(type("Bad", (), {"__annotations__": {"value": hint}}))
    assert line in str(caught.value)


def test_one_name_has_one_declaration() -> None:
    def declare(kind: type) -> None:
        schema("test.twice", version=1)(type("Twice", (), {"__annotations__": {"value": kind}}))

    declare(int)
    declare(int)
    with pytest.raises(SchemaError, match="test.twice is declared twice"):
        declare(str)


def test_a_dataclass_must_be_frozen() -> None:
    @dataclass
    class Loose:
        value: int

    with pytest.raises(SchemaError, match="must be frozen"):
        schema("test.loose", version=1)(Loose)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(SchemaError, match="dict is not a message: declare it with @schema"):
        encode({"a": 1})


def test_unknown_dtypes_are_refused_where_they_are_declared() -> None:
    with pytest.raises(SchemaError, match="float8"):
        array("float8", "T")


def test_messages_are_frozen_and_checked_by_their_own_post_init() -> None:
    @schema("test.guarded", version=1)
    class Guarded:
        value: int

        def __post_init__(self) -> None:
            if self.value < 0:
                raise ValueError("negative")

    with pytest.raises(AttributeError):
        Guarded(1).value = 2
    head, _ = encode(Guarded(1))
    plain = unpack(head)
    plain[3] = [-1]
    with pytest.raises(SchemaMismatch, match="test.guarded.*negative"):
        decode(pack(plain), [])


def test_neighbours_inside_a_function_can_be_nested() -> None:
    @schema("test.leaf", version=1)
    class Leaf:
        value: int

    @schema("test.tree", version=1)
    class Tree:
        leaves: List[Leaf]
        pair: Tuple[int, str]
        many: Tuple[float, ...]
        note: Json
        grids: List[Array] = array("int8", "X", "Y")

    tree = Tree([Leaf(1), Leaf(2)], (1, "x"), (1.0, 2.0), None, [np.zeros((1, 2), np.int8)])
    assert equal(there_and_back(tree), tree)


def test_one_of_several_schemas_comes_back_as_the_one_it_was() -> None:
    @schema("test.circle", version=1)
    class Circle:
        radius: float

    @schema("test.path", version=1)
    class Path:
        points: Array = array("float32", "N", 2)

    @schema("test.shapes", version=1)
    class Shapes:
        shapes: List[Union[Circle, Path]]

    sent = Shapes([Circle(2.0), Path(np.ones((3, 2), np.float32)), Circle(1.0)])
    assert equal(there_and_back(sent), sent)
    with pytest.raises(SchemaMismatch, match="expected test.circle or test.path, got str"):
        encode(Shapes(["a square"]))  # type: ignore[list-item]
    head, frames = encode(sent)
    for wrong in ([], ["test.circle"], ["test.shapes", []], [7, [2.0]], "test.circle", ["test.path", [2.0]]):
        plain = unpack(head)
        plain[3][0][0] = wrong
        with pytest.raises(SchemaMismatch):
            decode(pack(plain), frames)


def test_a_change_of_fields_changes_the_fingerprint() -> None:
    def fingerprint(name: str, **fields: Any) -> int:
        return schema_key(schema(name, version=1)(type("Some", (), {"__annotations__": fields})))[2]

    assert fingerprint("test.a", x=int) != fingerprint("test.b", x=int)
    declared = [{"x": int}, {"x": str}, {"y": int}, {"x": int, "y": int}]
    assert len({fingerprint(f"test.f{index}", **fields) for index, fields in enumerate(declared)}) == 4


def test_skew_is_between_schemas_that_both_know() -> None:
    assert schema_skew({"a": (1, 1)}, {"b": (2, 2)}) is None
    assert schema_skew({"a": (1, 1)}, {"a": (1, 1)}) is None
    assert "version 2" in str(schema_skew({"a": (1, 1)}, {"a": (2, 1)}))
    assert schema_skew({"a": (1, 1)}, {"a": "nonsense"}) is not None
    assert known_schemas()["test.number"] == schema_key(Number)[1:]


def test_importing_the_bus_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'zmq', 'msgpack', 'torch', 'pydantic'}"
    code = f"import sys, cosmos_actor.bus; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"[]\n"
