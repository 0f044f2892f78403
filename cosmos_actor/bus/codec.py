"""From declared field types to plain msgpack values and back, with every check on both sides.

Legend: an array travels as a raw frame; its slot in the plain value is ``[frame index, dtype, shape]``,
or ``[-1, reference schema, plain reference]`` when it travels by reference over the bulk plane.
A codec raises ``Bad`` with a short text; the object codec adds schema and field.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

Dim = Union[str, int]
Dims = Optional[Tuple[Dim, ...]]

DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    ).split()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPES["bfloat16"] = np.dtype("uint16")
ANY_DTYPE = "any"

MAX_ARRAY_RANK = 16
"""Above it numpy 1.22 and the bulk plane disagree about what is legal."""


class Bad(Exception):
    """A value that the declared type does not allow."""


class ArrayReference:
    """Base of schemas that stand for an array elsewhere; they have ``dtype: str``, ``shape`` and ``nbytes``."""

    dtype: str
    shape: Tuple[int, ...]
    nbytes: int


class Encoding:
    """What one message becomes: arrays in order, the slot of each inside the plain value, and references in it."""

    __slots__ = ("arrays", "slots", "references", "dims")

    def __init__(self) -> None:
        self.arrays: List[Any] = []
        self.slots: List[List[Any]] = []
        self.references: List[ArrayReference] = []
        self.dims: Dict[str, int] = {}

    def add(self, array: Any, dtype: str) -> List[Any]:
        slot = [len(self.arrays), dtype, array.shape]
        self.arrays.append(array)
        self.slots.append(slot)
        return slot


NO_ARRAYS = Encoding()
"""Of every message whose schema has none; nothing is ever added to it."""


class Decoding:
    """Frames to read from; references met on the way; arrays to put in the references' places."""

    __slots__ = ("frames", "references", "resolved", "dims")

    def __init__(self, frames: Sequence[Any], resolved: Optional[Sequence[Any]] = None) -> None:
        self.frames = frames
        self.references: List[ArrayReference] = []
        self.resolved = resolved
        self.dims: Dict[str, int] = {}


NO_FRAMES = Decoding(())
"""The same for the way back."""

Encoder = Callable[[Any, Encoding], Any]
Decoder = Callable[[Any, Decoding], Any]


class Codec:
    """``plain`` is set if a value of exactly that type needs no work at all; ``text`` enters the fingerprint."""

    __slots__ = ("text", "encode", "decode", "plain", "arrays")

    def __init__(
        self, text: str, encode: Encoder, decode: Decoder, plain: Optional[type] = None, arrays: bool = False
    ) -> None:
        self.text = text
        self.encode = encode
        self.decode = decode
        self.plain = plain
        self.arrays = arrays


def _wrong(expected: str, value: Any) -> Bad:
    return Bad(f"expected {expected}, got {type(value).__name__}")


def _scalar(kind: type, also: Tuple[type, ...]) -> Codec:
    name = kind.__name__

    def encode(value: Any, _: Encoding) -> Any:
        if type(value) is kind:
            return value
        if isinstance(value, also) and not (kind is not bool and isinstance(value, bool)):
            return kind(value)
        raise _wrong(name, value)

    def decode(value: Any, _: Decoding) -> Any:
        if type(value) is not kind:
            raise _wrong(name, value)
        return value

    return Codec(name, encode, decode, plain=kind)


INT = _scalar(int, (int, np.integer))
FLOAT = _scalar(float, (float, int, np.floating, np.integer))
BOOL = _scalar(bool, (np.bool_,))
STR = _scalar(str, (str,))
BYTES = _scalar(bytes, (bytes, bytearray))


def _json(value: Any, _: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind in (list, tuple):
        return [_json(item, _) for item in value]
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise Bad("keys of a Json value must be str")
        return {key: _json(item, _) for key, item in value.items()}
    raise _wrong("a Json value", value)


JSON = Codec("json", _json, _json)


def optional(inner: Codec) -> Codec:
    def encode(value: Any, ctx: Encoding) -> Any:
        return None if value is None else inner.encode(value, ctx)

    def decode(value: Any, ctx: Decoding) -> Any:
        return None if value is None else inner.decode(value, ctx)

    return Codec(f"optional[{inner.text}]", encode, decode, arrays=inner.arrays)


def one_of(inner: Dict[type, Tuple[str, Codec]]) -> Codec:
    """An object of one of several schemas: class -> (its name, its codec). Travels as ``[name, plain]``."""
    by_name = dict(inner.values())
    text = "one_of[{}]".format(",".join(codec.text for codec in by_name.values()))
    names = " or ".join(by_name)

    def encode(value: Any, ctx: Encoding) -> Any:
        found = inner.get(type(value))
        if found is None:
            raise _wrong(names, value)
        return [found[0], found[1].encode(value, ctx)]

    def decode(value: Any, ctx: Decoding) -> Any:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str or value[0] not in by_name:
            raise _wrong(f"[name, fields] of {names}", value)
        return by_name[value[0]].decode(value[1], ctx)

    return Codec(text, encode, decode, arrays=any(codec.arrays for codec in by_name.values()))


def sequence(inner: Codec, make: Callable[[List[Any]], Any], name: str) -> Codec:
    def encode(value: Any, ctx: Encoding) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong(name, value)
        return [inner.encode(item, ctx) for item in value]

    def decode(value: Any, ctx: Decoding) -> Any:
        if type(value) is not list:
            raise _wrong(name, value)
        return make([inner.decode(item, ctx) for item in value])

    return Codec(f"sequence[{inner.text}]", encode, decode, arrays=inner.arrays)


def fixed_tuple(inner: Sequence[Codec]) -> Codec:
    text = "tuple[{}]".format(",".join(codec.text for codec in inner))

    def encode(value: Any, ctx: Encoding) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise Bad(f"expected {len(inner)} items")
        return [codec.encode(item, ctx) for codec, item in zip(inner, value)]

    def decode(value: Any, ctx: Decoding) -> Any:
        if type(value) is not list or len(value) != len(inner):
            raise Bad(f"expected {len(inner)} items")
        return tuple(codec.decode(item, ctx) for codec, item in zip(inner, value))

    return Codec(text, encode, decode, arrays=any(codec.arrays for codec in inner))


def mapping(inner: Codec) -> Codec:
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong("dict", value)
        for key in value:
            if type(key) is not str:
                raise Bad("keys must be str")
        return value.items()

    def encode(value: Any, ctx: Encoding) -> Any:
        return {key: inner.encode(item, ctx) for key, item in check(value)}

    def decode(value: Any, ctx: Decoding) -> Any:
        return {key: inner.decode(item, ctx) for key, item in check(value)}

    return Codec(f"dict[{inner.text}]", encode, decode, arrays=inner.arrays)


def check_array(dtype: str, dims: Dims, got: str, shape: Sequence[int], seen: Dict[str, int]) -> None:
    """Raise ``Bad`` unless dtype and shape are the declared ones and equal dim names have equal sizes."""
    if got != dtype and dtype != ANY_DTYPE:
        raise Bad(f"expected dtype {dtype}, got {got}")
    if dims is None:
        return
    if len(shape) != len(dims):
        raise Bad(f"expected shape {list(dims)}, got {list(shape)}")
    for dim, size in zip(dims, shape):
        known = seen.setdefault(dim, size) if isinstance(dim, str) else dim
        if known != size:
            raise Bad(f"expected dim {dim} of size {known}, got {size} in shape {list(shape)}")


def array_codec(
    dtype: str, dims: Dims, reference_out: Encoder, reference_in: Callable[[str, Any], Any]
) -> Codec:
    """dtype and dims as declared (``None`` dims: any shape); the two functions carry references."""
    text = "array[{};{}]".format(dtype, "any" if dims is None else ",".join(map(str, dims)))
    storage = DTYPES.get(dtype)

    def encode(value: Any, ctx: Encoding) -> Any:
        if type(value) is np.ndarray and value.dtype is storage and value.flags.c_contiguous:
            name = dtype  # the common case, without a look at anything else
        elif isinstance(value, ArrayReference):
            check_array(dtype, dims, value.dtype, value.shape, ctx.dims)
            ctx.references.append(value)
            return [-1, *reference_out(value, ctx)]
        elif isinstance(value, np.ndarray):
            name, value = _storable(value, dtype)
        else:
            raise _wrong("an array", value)
        check_array(dtype, dims, name, value.shape, ctx.dims)
        return ctx.add(value, name)

    def decode(value: Any, ctx: Decoding) -> Any:
        if type(value) is not list or len(value) != 3 or type(value[0]) is not int:
            raise _wrong("an array slot", value)
        index, name, shape = value
        if index < 0:
            return _resolve(reference_in(name, shape), ctx, dtype, dims)
        if index >= len(ctx.frames):
            raise Bad(f"array frame {index} is missing")
        array = view(ctx.frames[index], name, shape)
        check_array(dtype, dims, name, array.shape, ctx.dims)
        return array

    return Codec(text, encode, decode, arrays=True)


def _resolve(reference: ArrayReference, ctx: Decoding, dtype: str, dims: Dims) -> Any:
    check_array(dtype, dims, reference.dtype, reference.shape, ctx.dims)
    ctx.references.append(reference)
    if ctx.resolved is None:
        return reference
    return ctx.resolved[len(ctx.references) - 1]


def _storable(value: Any, dtype: str) -> Tuple[str, Any]:
    """(dtype name, C-contiguous native array). One copy, and only if the layout is another one."""
    name = NAMES.get(value.dtype) or value.dtype.name
    if name == "bfloat16" or (dtype == "bfloat16" and name == "uint16"):
        value, name = value.view(np.uint16), "bfloat16"
    if name not in DTYPES:
        raise Bad(f"dtype {name} can not travel")
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    if not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    return name, value


def view(frame: Any, dtype: Any, shape: Any) -> Any:
    """A read-only array over the frame's own bytes. `dtype` and `shape` are what a stranger sent."""
    if type(dtype) is not str or dtype not in DTYPES or type(shape) is not list or len(shape) > MAX_ARRAY_RANK:
        raise Bad("malformed array slot")
    try:
        array: Any = np.ndarray(shape, DTYPES[dtype], frame)
    except (TypeError, ValueError, OverflowError) as error:
        raise Bad(f"no array of shape {shape} {dtype} in a frame of {_nbytes(frame)} bytes: {error}") from None
    if array.nbytes != _nbytes(frame):
        raise Bad(f"array of shape {shape} {dtype} needs {array.nbytes} bytes, frame has {_nbytes(frame)}")
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _nbytes(frame: Any) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def array_bytes(array: Any) -> Any:
    """The raw bytes of a C-contiguous array as a buffer, without a copy."""
    if array.size == 0:
        return b""
    return array.reshape(-1).view(np.uint8).data
