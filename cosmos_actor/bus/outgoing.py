"""A link's sending half: what is under way, the credit for it, and the batch that leaves next."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

import msgpack  # type: ignore[import-untyped]

from .codec import array_bytes
from .credit import Credit
from .delivery import Outbox, Ranges
from .envelope import (
    ACK,
    CALL,
    CHANNELS,
    EVENT,
    FLOOR,
    MESSAGE,
    NACK,
    PULSE,
    STATE,
    STATE_ACK,
    TAKEN,
    WORK,
    item,
    item_head,
    seal_items,
)
from .errors import BusError, DeadlineExceeded, MessageTooLarge, SchemaMismatch, WouldBlock, copy_of
from .handshake import Introduction
from .latest import LatestOutbox
from .limits import Limits
from .receipt import Receipt, until
from .ring import RingWriter
from .schema import to_plain

FLOOR_STEP = 8
"""The peer keeps at most this many results too long; told of each, it had more work with floors than with calls."""


NOT_OPEN = -1
"""The position of a ring that is not open."""

_NO_BUFFERS: Sequence[Any] = ()
_NONE = b"\xc0"


class Packed(NamedTuple):
    """A message ready for the wire, but for its number."""

    body: bytes
    buffers: Sequence[Any]
    nbytes: int
    lent: Sequence[Any] = ()
    """References in it that the peer holds from now on."""


_packed: Any = partial(tuple.__new__, Packed)
"""Packed's own constructor is a Python function; this one is called for every message."""


class Outgoing:
    """Nothing accepted is forgotten before it is done; a new wire gets all of it again, in order."""

    def __init__(self, peer: str, limits: Limits, theirs: Introduction, clock: Any) -> None:
        self.peer = peer
        self.wire: Any = None
        self.ring: Optional[RingWriter] = None
        """Where arrays go instead of the wire, once the peer has it open."""
        self.outboxes = (Outbox(), Outbox(), Outbox())
        self.credits = (
            Credit(theirs.work_window_messages, theirs.work_window_bytes),
            Credit(theirs.call_window_messages, theirs.work_window_bytes),
            Credit(theirs.event_window_messages, theirs.work_window_bytes),
        )
        self.latest = LatestOutbox(limits.state_topics)
        self.max_bytes = min(limits.max_message_bytes, theirs.max_message_bytes)
        self.sent_messages = self.sent_bytes = self.flushes = 0
        self.on_wire_down: Callable[[str], None] = lambda reason: None
        self.on_not_accepted: Callable[[Packed], None] = lambda packed: None
        self._ended: Optional[BusError] = None
        self._batch_limit = limits.batch_messages
        self._bytes_limit = limits.batch_bytes
        self._now = clock.now
        self._loop = asyncio.get_running_loop()
        self._pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack
        self._waiting: Tuple[Deque[Any], ...] = (deque(), deque(), deque())
        self._acks = (Ranges(), Ranges(), Ranges())
        self._floors_said = [1, 1, 1]
        self._settled = 0
        self._items: List[bytes] = []
        self._buffers: List[Any] = []
        self._batch_bytes = 0
        self._flush_soon: Optional[asyncio.Handle] = None
        self._has_acks = False
        self.taken = self._taken_said = NOT_OPEN
        """Everything of the peer's ring before `taken` was read; it is told with the next batch."""
        self.corked = False
        """Somebody flushes anyway when it is through: no call back is needed."""

    # -- messages -----------------------------------------------------------------------------------------------

    def pack(self, message: Any, extra: Any, encoded: Any = None) -> Packed:
        """Raises SchemaMismatch or MessageTooLarge; nothing was sent then."""
        schema, plain, encoding = encoded or to_plain(message)
        try:
            body = schema.wire_head + self._pack(plain) + (_NONE if extra is None else self._pack(extra))
        except (OverflowError, ValueError, TypeError) as error:
            raise SchemaMismatch(f"schema {schema.name}: a value can not travel: {error}") from None
        nbytes = len(body)
        buffers = _NO_BUFFERS
        if encoding.arrays:
            buffers = [array_bytes(array) for array in encoding.arrays]
            nbytes += sum(map(len, buffers))
        if nbytes > self.max_bytes:
            raise MessageTooLarge(
                f"message {schema.name} has {nbytes} bytes, the link takes {self.max_bytes}: use the bulk plane",
                peer=self.peer, setting="bus.max_message_bytes",
            )
        return _packed((body, buffers, nbytes, ()))  # type: ignore[no-any-return]

    def pack_plain(self, plain: Any) -> bytes:
        return self._pack(plain)  # type: ignore[no-any-return]

    async def send(self, channel: int, packed: Packed, deadline_s: float, *, now: bool = False) -> Receipt:
        """Accepted: waits for credit, then the message is ours until the peer is done with it.

        `now`: it leaves at once instead of with the next batch.
        """
        receipt = self.try_send(channel, packed, now=now)
        if receipt is not None:
            return receipt
        try:
            await self._wait_for_credit(channel, packed.nbytes, deadline_s)
        except BaseException:
            self.on_not_accepted(packed)
            raise
        return self._send(channel, packed, now)

    def try_send(self, channel: int, packed: Packed, *, now: bool = False) -> Optional[Receipt]:
        """Accepted, or None where `send` would wait or raise."""
        if self._waiting[channel] or self._ended is not None or not self.credits[channel].take(packed.nbytes):
            return None
        return self._send(channel, packed, now)

    def _send(self, channel: int, packed: Packed, now: bool) -> Receipt:
        outbox = self.outboxes[channel]
        number = outbox.next_number
        receipt = Receipt(self.peer, channel, number, packed, self._now)
        outbox.add(receipt)
        data = item_head(MESSAGE, channel, number, len(packed.buffers)) + packed.body
        if now:
            self._append(data, packed.buffers)
            self.flush()
        else:
            self.push(data, packed.buffers)
        return receipt

    def settle(self, receipts: Sequence[Receipt], value: Any) -> None:
        """The peer is done with them; their credit goes to whoever waits longest."""
        for receipt in receipts:
            self.credits[receipt.channel].give_back(receipt.packed.nbytes)
            receipt.settle(value)
            self._settled += 1
        for channel in (WORK, CALL, EVENT):
            if self._waiting[channel]:
                self._hand_on_credit(channel)

    async def _wait_for_credit(self, channel: int, nbytes: int, deadline_s: float) -> None:
        if self._ended is not None:
            raise copy_of(self._ended)
        if deadline_s <= 0:
            raise WouldBlock("no credit now", peer=self.peer, channel=CHANNELS[channel])
        future: Any = self._loop.create_future()
        waiter = (nbytes, future)
        self._waiting[channel].append(waiter)
        try:
            await until(future, deadline_s, lambda: self._no_credit(channel, deadline_s))
            if self._ended is not None:
                raise copy_of(self._ended)
        except BaseException:
            if waiter in self._waiting[channel]:
                self._waiting[channel].remove(waiter)
            elif future.done() and not future.cancelled() and future.exception() is None:
                self.credits[channel].give_back(nbytes)
            self._hand_on_credit(channel)
            raise
        finally:
            del waiter, future

    def _hand_on_credit(self, channel: int) -> None:
        waiting, credit = self._waiting[channel], self.credits[channel]
        while waiting:
            nbytes, future = waiting[0]
            if future.done():
                waiting.popleft()
                continue
            if not credit.take(nbytes):
                return
            waiting.popleft()
            future.set_result(None)

    def _no_credit(self, channel: int, deadline_s: float) -> BusError:
        facts: Dict[str, Any] = {"peer": self.peer, "channel": CHANNELS[channel]}
        oldest = self.outboxes[channel].oldest()
        text = f"no credit for {deadline_s:g} s"
        if oldest is not None:
            facts = oldest.facts()
            text += f"; the oldest message is not done after {self._now() - oldest.since:.1f} s"
        return DeadlineExceeded(text, setting=f"bus.{CHANNELS[channel]}_window_messages", **facts)

    # -- state --------------------------------------------------------------------------------------------------

    def publish(self, topic: str, packed: Packed) -> None:
        try:
            ready = self.latest.publish(topic, packed)
        except OverflowError:
            raise BusError("too many topics", peer=self.peer, channel="state", setting="bus.state_topics") from None
        self._push_state(ready)

    def confirmed(self, topic: str, revision: int) -> None:
        self._push_state(self.latest.confirm(topic, revision))

    def _push_state(self, ready: Optional[Tuple[int, Packed]]) -> None:
        if ready is not None:
            revision, packed = ready
            self.push(item_head(MESSAGE, STATE, revision, len(packed.buffers)) + packed.body, packed.buffers)

    # -- answers ------------------------------------------------------------------------------------------------

    def acknowledge(self, channel: int, number: int) -> None:
        self._acks[channel].add(number)
        self._has_acks = True
        if not self.corked:
            self.flush_soon()

    def want(self, channel: int, number: int) -> None:
        self.push(item(NACK, channel, number))

    def state_done(self, topic: str, revision: int) -> None:
        self.push(item(STATE_ACK, STATE, revision, topic))

    def again(self, channel: int, number: int) -> None:
        """The peer misses everything from this number on."""
        for receipt in self.outboxes[channel].again(number):
            packed = receipt.packed
            head = item_head(MESSAGE, channel, receipt.number, len(packed.buffers))
            self.push(head + packed.body, packed.buffers)

    def pulse(self, progress: int, busy_s: float, label: str) -> None:
        """A heartbeat; it also says what we sent and what we know, so that a loss shows at the last message too."""
        if self.wire is None:
            return
        self._add_floors()
        for late in self.latest.overdue():
            self._push_state(late)
        self.push(item(PULSE, WORK, progress, [busy_s, label, [box.next_number for box in self.outboxes]]))
        self.flush()

    # -- the batch ----------------------------------------------------------------------------------------------

    def push(self, data: bytes, buffers: Any = ()) -> None:
        """Put an item into the batch; a full one leaves."""
        self._append(data, buffers)
        if len(self._items) >= self._batch_limit or self._batch_bytes >= self._bytes_limit:
            self.flush()
        elif not self.corked and self._flush_soon is None:
            self._flush_soon = self._loop.call_soon(self.flush)

    def _append(self, data: bytes, buffers: Any) -> None:
        if self.wire is None:
            return  # a new wire gets everything that is under way
        self._items.append(data)
        self._batch_bytes += len(data)
        if buffers:
            self._buffers += buffers
            self._batch_bytes += sum(map(len, buffers))

    def flush_soon(self) -> None:
        if self._flush_soon is None:
            self._flush_soon = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the batch now."""
        if self._flush_soon is not None:
            self._flush_soon.cancel()
            self._flush_soon = None
        if self.wire is None:
            return
        if self._has_acks:
            self._add_acks()
        if self.taken != self._taken_said:
            self._items.append(item(TAKEN, WORK, self.taken))
            self._taken_said = self.taken
        if not self._items:
            return
        if self._settled >= FLOOR_STEP:
            self._add_floors()
        items, buffers, nbytes = self._items, self._buffers, self._batch_bytes
        self._items, self._buffers, self._batch_bytes = [], [], 0
        if self.wire.send(seal_items(items, buffers, self.ring)):
            self.sent_messages += len(items)
            self.sent_bytes += nbytes
            self.flushes += 1
        else:
            self.on_wire_down("the wire takes nothing")

    def _add_acks(self) -> None:
        self._has_acks = False
        for channel in (WORK, CALL, EVENT):
            ranges = self._acks[channel]
            if ranges:
                for first, last in ranges.take():
                    self._items.append(item(ACK, channel, first, last))

    def _add_floors(self) -> None:
        self._settled = 0
        for channel in (WORK, CALL, EVENT):
            floor = self.outboxes[channel].floor
            if floor != self._floors_said[channel]:
                self._floors_said[channel] = floor
                self._items.append(item(FLOOR, channel, floor))

    # -- wires --------------------------------------------------------------------------------------------------

    def attach(self, wire: Any) -> None:
        """Go on over this wire: everything that is not done is sent again."""
        self.detach()
        self.wire = wire
        self._floors_said = [1, 1, 1]
        for channel in (WORK, CALL, EVENT):
            self.again(channel, 0)
        for _, revision, packed in self.latest.again():
            self._push_state((revision, packed))
        self.flush()

    def detach(self) -> None:
        self.wire = self.ring = None
        self.taken = self._taken_said = NOT_OPEN
        self._items, self._buffers, self._batch_bytes = [], [], 0

    def end(self, error: BusError) -> int:
        """No peer any more: whoever waits gets the error. Returns how many messages were not done."""
        self.flush()
        self.detach()
        self._ended = error
        lost = 0
        for channel, outbox in enumerate(self.outboxes):
            for receipt in outbox.clear():
                lost += 1
                receipt.settle(_with_facts(error, receipt))
            for _, future in self._waiting[channel]:
                if not future.done():
                    future.set_exception(copy_of(error))
            self._waiting[channel].clear()
        return lost

    @property
    def under_way(self) -> int:
        return sum(map(len, self.outboxes)) + self.latest.unconfirmed

    def statistics(self) -> Dict[str, Any]:
        return {
            "sent_items": self.sent_messages,
            "sent_bytes": self.sent_bytes,
            "batches": self.flushes,
            "under_way": {CHANNELS[index]: len(box) for index, box in enumerate(self.outboxes)},
            "accepted": {CHANNELS[index]: box.next_number - 1 for index, box in enumerate(self.outboxes)},
            "redelivered": sum(box.redelivered for box in self.outboxes),
            "state_skipped": self.latest.skipped,
            "credit": {CHANNELS[index]: credit.statistics() for index, credit in enumerate(self.credits)},
        }


def _with_facts(error: BusError, receipt: Receipt) -> BusError:
    copied = copy_of(error)
    copied.channel, copied.message_id = CHANNELS[receipt.channel], receipt.message_id
    return copied
