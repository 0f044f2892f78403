"""Every error of the bus, in one tree.

Each renders into one line that says what happened, between whom, and which setting to change.
"""

from __future__ import annotations

from typing import Any, Dict, Optional


class BusError(Exception):
    """Something the bus could not do. ``str`` of it is one line with peer, channel, message id and setting."""

    def __init__(
        self,
        text: str,
        *,
        peer: Optional[str] = None,
        channel: Optional[str] = None,
        message_id: Optional[str] = None,
        setting: Optional[str] = None,
    ) -> None:
        super().__init__(text)
        self.text = text
        self.peer = peer
        self.channel = channel
        self.message_id = message_id
        self.setting = setting

    def __str__(self) -> str:
        facts = (("peer", self.peer), ("channel", self.channel), ("message", self.message_id))
        known = [f"{name} {value}" for name, value in facts if value is not None]
        if self.setting is not None:
            known.append(f"setting `{self.setting}`")
        line = self.text if not known else "{} ({})".format(self.text, ", ".join(known))
        return " ".join(line.split())

    def __reduce__(self) -> Any:
        facts = {key: getattr(self, key) for key in ("peer", "channel", "message_id", "setting")}
        return _rebuild, (type(self), self.text, facts)


def copy_of(error: BusError) -> BusError:
    """To raise where the error itself is kept: one that was raised holds the frames that it passed and all in them."""
    make, arguments = error.__reduce__()
    copied = make(*arguments)
    copied.__dict__.update(error.__dict__)
    return copied  # type: ignore[no-any-return]


def _rebuild(kind: Any, text: str, facts: Dict[str, Any]) -> BusError:
    error = kind.__new__(kind)
    BusError.__init__(error, text, **facts)
    return error  # type: ignore[no-any-return]


class DeadlineExceeded(BusError):
    """A wait ended before the awaited thing came; the line names the oldest message and its age."""


class WouldBlock(BusError):
    """There is no credit right now and the caller asked not to wait."""


class LinkClosed(BusError):
    """We closed the link ourselves."""


class PeerLost(BusError):
    """The peer's incarnation is gone for good: its receipts will never be done."""

    def __init__(self, reason: str, **facts: Any) -> None:
        super().__init__(f"peer lost: {reason}", **facts)
        self.reason = reason


class PeerRefused(BusError):
    """The handshake ended with a no; ``reason`` says which rule."""

    def __init__(self, reason: str, **facts: Any) -> None:
        super().__init__(f"peer refused: {reason}", **facts)
        self.reason = reason


class RemoteError(BusError):
    """The peer's handler raised. ``kind`` is the class name there, ``text`` its line."""

    def __init__(self, kind: str, text: str, **facts: Any) -> None:
        super().__init__(f"{kind}: {text}", **facts)
        self.kind = kind
        self.remote_text = text


class MessageTooLarge(BusError):
    """Refused at the sender, before anything was sent."""


class CorruptFrame(BusError):
    """Bytes that are not what the peer sent. Costs the link, never the process."""


class GapError(BusError):
    """Numbers are missing on an ordered channel; ``first``..``last`` (inclusive) never came."""

    def __init__(self, first: int, last: int, **facts: Any) -> None:
        super().__init__(f"gap: numbers {first}..{last} never came", **facts)
        self.first = first
        self.last = last


class SchemaError(BusError):
    """A message or its declaration breaks the schema's rules."""


class UnknownSchema(SchemaError):
    """Nobody declared a schema of this name in this process."""


class SchemaMismatch(SchemaError):
    """The schema is known, the version, a type, a dtype or a shape is another one."""


class BulkError(BusError):
    """Something about an array that travels by reference."""


class BulkFull(BulkError):
    """The store's byte budget has no room for the array."""


class NoSharedMemory(BulkError):
    """This process may not have the shared memory that its store is to have."""


class BulkGone(BulkError):
    """The referenced bytes do not exist any more."""


class BulkCorrupt(BulkError):
    """The referenced bytes have another digest."""


class AddressInUse(BusError):
    """Somebody listens at this address already."""


class DescriptorLimit(BusError):
    """The process may open too few file descriptors for what is asked of it."""


class KeyFileError(BusError):
    """A key file is missing, unreadable, of another run, or readable by others."""
