"""Typed, versioned messages: dataclasses whose fields are checked at the sender and again at the receiver.

    @schema("observation", version=1)
    class Observation:
        episode: str
        image: Array = array("uint8", "H", "W", 3)
        reward: Optional[Array] = array("float32", "T", optional=True)

Two dims of one name in one object must have one size. A message of an unknown schema, another version, another
declaration under the same version, or with a wrong type, dtype or shape raises a SchemaError naming schema and field.
Arrays are never copied through msgpack; decoded arrays are read-only views over the received frame.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union
from zlib import crc32

import msgpack  # type: ignore[import-untyped]

from . import codec
from .codec import ANY_DTYPE, DTYPES, NO_ARRAYS, NO_FRAMES, ArrayReference, Bad, Codec, Decoding, Dim, Encoding
from .errors import BusError, SchemaError, SchemaMismatch, UnknownSchema

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    Json = Any
    Array = Any
else:

    def dataclass_transform(**_: Any) -> Callable[[T], T]:
        return lambda function: function

    class Json:
        """Field type: None, bool, int, float, str, bytes, and lists and str-keyed dicts of them."""

    class Array:
        """Field type: a numpy array, or the reference to one; ``array(...)`` declares dtype and dims."""


_ARRAY = "cosmos_actor.array"
_registry: Dict[str, type] = {}
_codecs: Dict[Any, Any] = {}
_named: Dict[Any, Any] = {}
"""Class, and name -> how it is encoded."""


def array(dtype: str = ANY_DTYPE, *dims: Dim, optional: bool = False) -> Any:
    """Declare an array field: dtype name (or "any"), then a name or a fixed size per dim (none given: any shape)."""
    if dtype != ANY_DTYPE and dtype not in DTYPES:
        raise SchemaError(f"unknown dtype {dtype!r} in an array declaration")
    metadata = {_ARRAY: (dtype, dims or None)}
    if optional:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, array))
def schema(name: str, *, version: int) -> Callable[[Type[T]], Type[T]]:
    """Declare a message class. It becomes a frozen dataclass unless it is one; one name has one class per process."""

    def decorate(cls: Type[T]) -> Type[T]:
        made = cls if "__dataclass_fields__" in vars(cls) else dataclasses.dataclass(frozen=True)(cls)
        if not made.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise SchemaError(f"schema {name}: the dataclass must be frozen")
        _codecs[made] = ObjectCodec(name, version, made)
        _register(name, made)
        return made

    return decorate


def _register(name: str, cls: type) -> None:
    known = _registry.get(name)
    if known is not None and schema_key(known) != schema_key(cls):
        raise SchemaError(f"schema {name} is declared twice with different contents: {known!r} and {cls!r}")
    _registry[name] = cls
    _named[name] = _codecs[cls]


def schema_key(message_type: Any) -> Tuple[str, int, int]:
    """(name, version, fingerprint of the whole declaration) of a message class or message."""
    return codec_of(message_type).key


def known_schemas() -> Dict[str, Tuple[int, int]]:
    """name -> (version, fingerprint) of everything declared in this process."""
    return {name: schema_key(cls)[1:] for name, cls in _registry.items()}


def schema_class(name: str) -> type:
    """The class declared under this name; UnknownSchema if there is none."""
    cls = _registry.get(name)
    if cls is None:
        raise UnknownSchema(f"unknown schema {name!r}: import the module that declares it")
    return cls


def is_schema(cls: Any) -> bool:
    return isinstance(cls, type) and cls in _codecs


class ObjectCodec(Codec):
    """Encodes one class. An object whose fields all have exactly their plain types takes one C-level pass."""

    __slots__ = (
        "name", "cls", "key", "wire_head", "names", "fields", "getter", "plain_types", "post_init", "special", "pick",
        "picked",
    )

    def __init__(self, name: str, version: int, cls: Any) -> None:
        self.name = name
        self.cls = cls
        self.names = tuple(field.name for field in dataclasses.fields(cls))
        self.fields = _field_codecs(name, cls)
        described = ",".join(f"{field}:{inner.text}" for field, inner in zip(self.names, self.fields))
        text = f"{name}/{version}{{{described}}}"
        super().__init__(text, self._encode, self._decode, arrays=any(inner.arrays for inner in self.fields))
        self.key = (name, version, crc32(text.encode()))
        self.wire_head = b"\x95" + b"".join(map(msgpack.packb, self.key))
        """msgpack of the first three of [name, version, fingerprint, plain, key or topic]."""
        self.getter = _tuple_getter(self.names)
        self.plain_types = [inner.plain for inner in self.fields]
        self.post_init = hasattr(cls, "__post_init__")
        self.special = tuple((at, inner) for at, inner in enumerate(self.fields) if inner.plain is None)
        plain = [at for at, kind in enumerate(self.plain_types) if kind is not None]
        self.pick = itemgetter(*plain) if plain else _nothing
        self.picked = self.pick(self.plain_types)

    def _encode(self, message: Any, ctx: Encoding) -> Any:
        if type(message) is not self.cls:
            raise Bad(f"expected {self.name}, got {type(message).__name__}")
        values = self.getter(message)
        types = list(map(type, values))
        if types == self.plain_types:
            return values
        if self.pick(types) != self.picked:
            return self._each("encode", values, ctx)
        outer, ctx.dims = ctx.dims, {}
        out, at = list(values), 0
        try:
            for at, inner in self.special:
                out[at] = inner.encode(values[at], ctx)
        except Bad as bad:
            raise Bad(_join(self.names[at], str(bad))) from None
        ctx.dims = outer
        return out

    def _decode(self, values: Any, ctx: Decoding) -> Any:
        if type(values) is not list or len(values) != len(self.names):
            raise Bad(f"expected the {len(self.names)} fields of {self.name}")
        types = list(map(type, values))
        if types != self.plain_types:
            values = self._decode_special(values, types, ctx)
        message: Any = object.__new__(self.cls)
        message.__dict__.update(zip(self.names, values))
        if self.post_init:
            try:
                message.__post_init__()
            except (ValueError, TypeError, BusError) as error:
                raise Bad(str(error)) from None
        return message

    def _decode_special(self, values: List[Any], types: List[type], ctx: Decoding) -> List[Any]:
        if self.pick(types) != self.picked:
            return self._each("decode", values, ctx)
        outer, ctx.dims = ctx.dims, {}
        out, at = list(values), 0
        try:
            for at, inner in self.special:
                out[at] = inner.decode(values[at], ctx)
        except Bad as bad:
            raise Bad(_join(self.names[at], str(bad))) from None
        ctx.dims = outer
        return out

    def _each(self, way: str, values: Sequence[Any], ctx: Any) -> List[Any]:
        """Every field by itself: converts what may be converted, and says which one is wrong."""
        outer, ctx.dims = ctx.dims, {}
        out = []
        for name, inner, value in zip(self.names, self.fields, values):
            try:
                out.append(value if type(value) is inner.plain else getattr(inner, way)(value, ctx))
            except Bad as bad:
                raise Bad(_join(name, str(bad))) from None
        ctx.dims = outer
        return out


def _nothing(types: Any) -> Tuple[()]:
    return ()


def _join(field: str, text: str) -> str:
    return f"field {field}." + text[len("field "):] if text.startswith("field ") else f"field {field}: {text}"


def _tuple_getter(names: Tuple[str, ...]) -> Callable[[Any], Tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def _field_codecs(name: str, cls: Any) -> Tuple[Codec, ...]:
    # A class declared inside a function may name its neighbours: they are the caller's locals.
    hints = typing.get_type_hints(cls, localns=dict(sys._getframe(3).f_locals))
    out = []
    for field in dataclasses.fields(cls):
        try:
            declared = field.metadata.get(_ARRAY)
            made = _codec_for(hints[field.name], declared)
            may_be_none = declared and field.default is None and not made.text.startswith("optional")
            out.append(codec.optional(made) if may_be_none else made)
        except Bad as bad:
            raise SchemaError(f"schema {name} field {field.name}: {bad}") from None
    return tuple(out)


_SCALARS: Dict[Any, Codec] = {int: codec.INT, float: codec.FLOAT, bool: codec.BOOL, str: codec.STR, bytes: codec.BYTES}


def _codec_for(hint: Any, declared: Optional[Tuple[str, Optional[Tuple[Dim, ...]]]]) -> Codec:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is Array or (hint is Any and declared):
        dtype, dims = declared or (ANY_DTYPE, None)
        return codec.array_codec(dtype, dims, _reference_out, _reference_in)
    if hint is Json:
        return codec.JSON
    if is_schema(hint):
        return codec_of(hint)
    return _container(hint, declared)


def _container(hint: Any, declared: Any) -> Codec:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union or type(hint).__name__ == "UnionType":
        kept = [kind for kind in inner if kind is not type(None)]
        if len(kept) == 1 and len(inner) == 2:
            return codec.optional(_codec_for(kept[0], declared))
        if len(kept) == len(inner) and all(is_schema(kind) for kind in kept):
            return codec.one_of({kind: (codec_of(kind).name, codec_of(kind)) for kind in kept})
    elif origin is list:
        return codec.sequence(_codec_for(inner[0], declared), list, "list")
    elif origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return codec.sequence(_codec_for(inner[0], declared), tuple, "tuple")
    elif origin is tuple:
        return codec.fixed_tuple([_codec_for(kind, declared) for kind in inner])
    elif origin is dict and inner[0] is str:
        return codec.mapping(_codec_for(inner[1], declared))
    raise Bad(
        f"type {hint!r} can not be declared; use int, float, bool, str, bytes, Optional, List, Tuple, "
        "Dict[str, ..], Json, array(...), another schema, or a Union of schemas"
    )


def _reference_out(reference: Any, ctx: Encoding) -> Any:
    inner = codec_of(reference)
    return inner.name, inner.encode(reference, ctx)


def _reference_in(name: Any, plain: Any) -> ArrayReference:
    cls = _registry.get(name) if type(name) is str else None
    if cls is None or not issubclass(cls, ArrayReference):
        raise Bad(f"{name!r} is not a known array reference")
    made = codec_of(cls).decode(plain, Decoding(()))
    assert isinstance(made, ArrayReference)
    return made


def codec_of(message_or_class: Any) -> ObjectCodec:
    """The compiled codec; SchemaError if the class was not declared with ``@schema``."""
    cls = message_or_class if isinstance(message_or_class, type) else type(message_or_class)
    known = _codecs.get(cls)
    if known is None:
        raise SchemaError(f"{cls.__name__} is not a message: declare it with @schema(name, version=…)")
    return known  # type: ignore[no-any-return]


def to_plain(message: Any) -> Tuple[ObjectCodec, Any, Encoding]:
    """(its codec, plain value, encoding with the arrays). Raises SchemaMismatch naming schema and field."""
    inner = _codecs.get(type(message)) or codec_of(message)
    encoding = Encoding() if inner.arrays else NO_ARRAYS
    try:
        return inner, inner._encode(message, encoding), encoding
    except Bad as bad:
        raise SchemaMismatch(f"schema {inner.name}: {bad}") from None
    except RecursionError:
        raise SchemaMismatch(f"schema {inner.name}: a Json value is nested too deep") from None


def from_plain(
    key: Tuple[Any, Any, Any], plain: Any, frames: Sequence[Any], resolved: Optional[Sequence[Any]] = None
) -> Tuple[Any, List[ArrayReference]]:
    """(message, references in it). With ``resolved`` the references' places hold these arrays instead, in order."""
    inner = _named.get(key[0]) or codec_of(schema_class(key[0]))
    if inner.key != key:
        check_key(inner.key, *key[1:])
    decoding = Decoding(frames, resolved) if inner.arrays else NO_FRAMES
    try:
        return inner._decode(plain, decoding), decoding.references
    except Bad as bad:
        raise SchemaMismatch(f"schema {inner.name}: {bad}") from None
    except RecursionError:
        raise SchemaMismatch(f"schema {inner.name}: a Json value is nested too deep") from None


def check_key(ours: Tuple[str, int, int], version: int, fingerprint: int) -> None:
    """Raise SchemaMismatch unless version and declaration are ours."""
    name, our_version, our_fingerprint = ours
    if version != our_version:
        raise SchemaMismatch(f"schema {name}: we have version {our_version}, the peer version {version}")
    if fingerprint != our_fingerprint:
        raise SchemaMismatch(f"schema {name} version {version}: the peer declares other fields; raise the version")


def schema_skew(ours: Mapping[str, Tuple[int, int]], theirs: Mapping[str, Any]) -> Optional[str]:
    """One line about the first schema that both know and declare differently, or None."""
    for name in sorted(set(ours) & set(theirs)):
        try:
            check_key((name, *ours[name]), *theirs[name])
        except (SchemaMismatch, TypeError, ValueError) as error:
            return str(error)
    return None


def pack(plain: Any) -> bytes:
    """msgpack bytes. Raises OverflowError for an integer of more than 64 bits."""
    return msgpack.packb(plain, use_bin_type=True)  # type: ignore[no-any-return]


SKIM_FROM_BYTES = 1024
"""Longer msgpack is gone through once before anything is made of it. A list in a list in a list, each of which only
claims to be long, made the parser reserve 8 GB for 1 MB of input; what is shorter can make it reserve 2 MB."""


def unpack(data: Any) -> Any:
    """The plain value in these bytes; ValueError for anything but one whole msgpack value without extensions.

    A timestamp, which is an extension that msgpack knows itself, comes as a float.
    """
    try:
        if len(data) > SKIM_FROM_BYTES:
            _skim(data)
        return msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extensions, timestamp=1)
    except (msgpack.exceptions.UnpackException, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not msgpack: {type(error).__name__}") from None


def _skim(data: Any) -> None:
    """Raises unless all is there that is claimed to be."""
    skimmed = msgpack.Unpacker(max_buffer_size=len(data), read_size=1)
    skimmed.feed(data)
    skimmed.skip()


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError("msgpack extension types are refused")


def encode(message: Any) -> Tuple[bytes, List[Any]]:
    """(head bytes, raw buffers of the arrays in order). Arrays are not copied."""
    inner, plain, encoding = to_plain(message)
    try:
        head = pack([*inner.key, plain])
    except (OverflowError, ValueError) as error:
        raise SchemaMismatch(f"schema {inner.name}: a value can not travel: {error}") from None
    return head, [codec.array_bytes(item) for item in encoding.arrays]


def decode(head: Any, buffers: Sequence[Any]) -> Any:
    """The message; its arrays are read-only views over ``buffers``. SchemaError or ValueError otherwise."""
    name, version, fingerprint, plain = unpack(head)
    return from_plain((name, version, fingerprint), plain, buffers)[0]
