"""The sizes of a decoder that is trained from scratch, as one line: ``tiny:qwen3?hidden=128&layers=4``. No torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from cosmos_actor.actors.errors import BadValue, UnknownName

TINY = "tiny:"


@dataclass(frozen=True)
class TinySpec:
    """A decoder's sizes. Only what can be built is ever one. Raises BadValue."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 352
    vocab: int = 32
    positions: int = 256

    def __post_init__(self) -> None:
        if min(astuple(self)) < 1:
            raise BadValue(f"every size of a tiny model is at least 1, not as in {self}", setting="policy.model")
        if self.hidden % (2 * self.heads):
            raise BadValue(f"hidden = {self.hidden} is no multiple of 2 x heads = {2 * self.heads}: rotary positions "
                           "take the numbers of a head in pairs", setting="policy.model")
        if self.heads % self.kv_heads:
            raise BadValue(f"heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}", setting="policy.model")

    @classmethod
    def parse(cls, name: str) -> TinySpec:
        """Raises UnknownName or BadValue, naming the part of `name` that is wrong."""
        family, _, query = name.removeprefix(TINY).partition("?")
        if family != "qwen3":
            raise UnknownName(f"unknown model family {family!r} in {name!r}; there is qwen3", setting="policy.model")
        return cls(**dict(_size(part, name) for part in filter(None, query.split("&"))))


def _size(part: str, name: str) -> tuple[str, int]:
    known = [field.name for field in fields(TinySpec)]
    key, _, value = part.partition("=")
    if key not in known:
        raise UnknownName(f"unknown size {key!r} in {name!r}; there are {', '.join(sorted(known))}",
                          setting="policy.model")
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise BadValue(f"size {key} in {name!r} is a number, not {value!r}", setting="policy.model")
    return key, int(value)
