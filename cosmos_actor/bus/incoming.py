"""A link's receiving half: items in, handlers run, results and acknowledgements out."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import errors
from .codec import ArrayReference
from .delivery import FINISHED, GAP, NEW, OVER, SETTLED, Inbox
from .envelope import CALL, CHANNELS, EVENT, FAILED, RESULT, STATE, WORK, item_head
from .errors import BusError, CorruptFrame, GapError, RemoteError
from .handlers import Handler, HandlerTable, Lane
from .latest import LatestInbox
from .limits import Limits
from .outgoing import Outgoing, Packed
from .schema import from_plain, to_plain

_ENDS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a task or a process. Other errors are answers, also those that libraries derive from BaseException."""


class Job(NamedTuple):
    """One message on its way to its handler."""

    handler: Optional[Handler]
    channel: int
    number: int
    extra: Any
    """Idempotency key or topic."""
    message: Any
    references: List[ArrayReference]
    wire_form: Tuple[Sequence[Any], Sequence[Any]]
    """(body, frames), to decode once more when the references were fetched."""


_job = partial(tuple.__new__, Job)
"""Job's own constructor is a Python function; this one is called for every message."""

Answer = Optional[Tuple[int, Packed]]
"""None: done without a result. Else RESULT or FAILED and its body."""


class Incoming:
    """Each number reaches its handler once; whatever the handler does, the sender gets exactly one answer."""

    def __init__(self, link: Any, out: Outgoing, table: HandlerTable, limits: Limits, executor: Any) -> None:
        self.inboxes = (
            Inbox(limits.work_window_messages), Inbox(limits.call_window_messages), Inbox(limits.event_window_messages),
        )
        self.latest = LatestInbox()
        self.states: Dict[str, Any] = {}
        self._state_next: Dict[str, Optional[Job]] = {}
        """Topics whose handler runs, with the value that comes after; newer ones take its place."""
        self.tasks: Set[Any] = set()
        self.failures = self.unhandled_events = 0
        self._link = link
        self._out = out
        self._table = table
        self._limits = limits
        self._executor = executor
        self._lanes: Dict[str, Lane] = {}
        self._keyed: OrderedDict[str, Any] = OrderedDict()
        self._lingering: List[Set[int]] = [set(), set(), set()]
        self._operations = (
            self._message, self._result, self._failed, self._ack, self._floor, self._nack, self._state_ack, self._pulse,
            self._taken,
        )

    def receive(self, items: Any, frames: Sequence[Any]) -> None:
        """A whole batch. Raises CorruptFrame if it is not one; items before the bad one were taken."""
        position = 0
        operations = self._operations
        self._out.corked = True
        try:
            for operation, channel, number, count, body in items:
                if type(number) is not int or number < 0 or channel < 0 or operation < 0:
                    raise ValueError("an item with a number that is none")
                if count:
                    own, position = frames[position:position + count], position + count
                    operations[operation](channel, number, body, own)
                else:
                    operations[operation](channel, number, body, ())
        except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
            raise CorruptFrame(f"an item that is none: {error!r}") from error
        finally:
            self._out.corked = False
        if position != len(frames):
            raise CorruptFrame(f"{len(frames)} arrays came, {position} were announced")
        self._out.flush()

    # -- messages -----------------------------------------------------------------------------------------------

    def _message(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        if channel == STATE:
            self._state(number, body, frames)
            return
        inbox = self.inboxes[channel]
        verdict = inbox.accept(number)
        if verdict is NEW:
            self._begin(channel, number, body, frames)
        elif verdict is FINISHED:
            self._answer(channel, number, inbox.result(number))
        elif verdict is SETTLED:
            self._out.acknowledge(channel, number)
        elif verdict is GAP:
            self._gap(channel, inbox.expected, number - 1)
        elif verdict is OVER:
            raise CorruptFrame(f"the peer sent more {CHANNELS[channel]} than its credit")

    def _begin(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        name, version, fingerprint, plain, extra = body
        if channel == CALL and extra is not None and self._known_key(number, extra):
            return
        try:
            message, references = from_plain((name, version, fingerprint), plain, frames)
        except BusError as error:
            self._finish(channel, number, extra, self._failure(error))
            return
        if references:
            self._link.borrow(references)
        table = self._table.events if channel == EVENT else self._table.requests
        job = _job((table.get(name), channel, number, extra, message, references, (body, frames)))
        self._dispatch("event" if channel == EVENT and name not in self._table.apart else name, job)

    def _dispatch(self, lane_name: str, job: Job) -> None:
        handler = job.handler
        lane = self._lanes.get(lane_name)
        if lane is None:
            lane = self._lanes[lane_name] = Lane(handler.concurrency if handler else 1, self._run, self.tasks)
        if lane.active or job.references or (handler is not None and (handler.is_async or self._executor)):
            lane.submit(job)
        else:
            self._run_inline(job)

    def _run_inline(self, job: Job) -> None:
        try:
            reply = job.handler.function(job.message, self._link) if job.handler else self._no_handler(job)
            encoded = None if reply is None or job.channel >= EVENT else to_plain(reply)
            if encoded is not None and self._link.bulk_concerns(encoded):
                self._link.spawn(self._finish_large(job, reply, encoded))
                return
            answer = None if encoded is None else (RESULT, self._out.pack(reply, None, encoded))
        except _ENDS:
            raise
        except BaseException as error:  # whatever a handler raises is the sender's answer
            answer = self._failure(error)
        self._finish(job.channel, job.number, job.extra, answer)

    async def _run(self, job: Job) -> None:
        try:
            message = job.message
            if job.references and self._link.resolves_bulk:
                message = await self._link.fetch(job.wire_form, job.references)
            reply = await self._invoke(job, message)
            answer = None if reply is None or job.channel >= EVENT else await self._pack_large(reply, to_plain(reply))
        except _ENDS:
            raise
        except BaseException as error:  # whatever a handler raises is the sender's answer
            answer = self._failure(error)
        self._finish(job.channel, job.number, job.extra, answer)

    async def _invoke(self, job: Job, message: Any) -> Any:
        if job.handler is None:
            return self._no_handler(job)
        if job.handler.is_async:
            return await job.handler.function(message, self._link)
        if self._executor is None:
            return job.handler.function(message, self._link)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, job.handler.function, message, self._link)

    def _no_handler(self, job: Job) -> Any:
        if job.channel == EVENT:
            self.unhandled_events += 1
        elif job.channel != STATE:
            raise BusError(f"nobody serves {job.wire_form[0][0]} here")
        return None

    # -- answers ------------------------------------------------------------------------------------------------

    async def _pack_large(self, reply: Any, encoded: Any) -> Answer:
        return RESULT, await self._link.pack(reply, None, self._limits.default_deadline_s, encoded)

    async def _finish_large(self, job: Job, reply: Any, encoded: Any) -> None:
        try:
            answer = await self._pack_large(reply, encoded)
        except BusError as error:
            answer = self._failure(error)
        self._finish(job.channel, job.number, job.extra, answer)

    def _failure(self, error: BaseException) -> Answer:
        self.failures += 1
        kind = type(error).__name__
        text = error.remote_text if isinstance(error, RemoteError) else str(error)
        body = self._out.pack_plain([kind, text[:2000]])
        return FAILED, Packed(body, [], len(body))

    def _finish(self, channel: int, number: int, extra: Any, answer: Answer) -> None:
        if channel == STATE:
            self._state_finished(extra, number)
            return
        if extra is None or channel != CALL:
            if self.inboxes[channel].finish(number, answer):
                self._answer(channel, number, answer)
            return
        for also in self._keyed_numbers(channel, number, extra, answer):
            self._finish_one(channel, also, answer, first=also == number)

    def _finish_one(self, channel: int, number: int, answer: Answer, *, first: bool) -> None:
        if not first and answer is not None and answer[1].lent:
            try:
                self._link.lend_again(answer[1])
            except BusError as error:
                answer = self._failure(error)
        if self.inboxes[channel].finish(number, answer):
            self._answer(channel, number, answer)

    def _answer(self, channel: int, number: int, answer: Answer) -> None:
        if answer is None:
            self._out.acknowledge(channel, number)
        else:
            operation, packed = answer
            head = item_head(operation, channel, number, len(packed.buffers))
            self._out.push(head + packed.body, packed.buffers)
        if channel == CALL:
            self._link.stay_awake()

    def _known_key(self, number: int, key: str) -> bool:
        """Whether a call of this key runs or has run; then `number` shares its answer."""
        entry = self._keyed.get(key)
        if entry is None:
            self._keyed[key] = [[number], None]
            while len(self._keyed) > self._limits.idempotency_keys:
                self._keyed.popitem(last=False)
            return False
        numbers, answer = entry
        if numbers:
            numbers.append(number)
        else:
            self._finish_one(CALL, number, answer, first=False)
        return True

    def _keyed_numbers(self, channel: int, number: int, extra: Any, answer: Answer) -> List[int]:
        entry = self._keyed.get(extra)
        if entry is None or number not in entry[0]:
            return [number]
        numbers, entry[0], entry[1] = entry[0], [], answer
        return numbers  # type: ignore[no-any-return]

    # -- the peer's answers to us -------------------------------------------------------------------------------

    def _result(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        name, version, fingerprint, plain, _ = body  # first: what fails here must leave the receipt under way
        if type(name) is not str:
            raise TypeError("a schema without a name")
        receipt = self._out.outboxes[channel].done(number)
        if receipt is None:
            return
        try:
            message, references = from_plain((name, version, fingerprint), plain, frames)
        except BusError as error:
            self._out.settle([receipt], error)
            return
        if references and self._link.resolves_bulk:
            self._link.spawn(self._fetch_result(receipt, (body, frames), references))
        else:
            self._link.borrow(references)
            self._out.settle([receipt], message)

    async def _fetch_result(self, receipt: Any, wire_form: Any, references: List[ArrayReference]) -> None:
        try:
            value = await self._link.fetch(wire_form, references)
        except BusError as error:
            value = error
        self._out.settle([receipt], value)

    def _failed(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        kind, text = body
        if type(kind) is not str or type(text) is not str:
            raise TypeError("a failure without words")
        receipt = self._out.outboxes[channel].done(number)
        if receipt is not None:
            self._out.settle([receipt], _remote(kind, text, receipt.facts()))

    def _ack(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        self._out.settle(self._out.outboxes[channel].done_range(number, body), None)

    def _floor(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        self.inboxes[channel].release(number)

    # -- state --------------------------------------------------------------------------------------------------

    def _state(self, revision: int, body: Any, frames: Sequence[Any]) -> None:
        name, version, fingerprint, plain, topic = body
        if self.latest.topics >= self._limits.state_topics and topic not in self.states:
            raise CorruptFrame("the peer publishes more topics than bus.state_topics")
        if not self.latest.accept(topic, revision):
            if topic not in self._state_next:
                self._out.state_done(topic, revision)
            return
        try:
            message, references = from_plain((name, version, fingerprint), plain, frames)
        except BusError:
            self.failures += 1
            self._out.state_done(topic, revision)
            return
        self.states[topic] = message
        handler = self._table.topics.get(topic)
        job = Job(handler, STATE, revision, topic, message, references, (body, frames))
        if topic in self._state_next:
            self.latest.skipped += self._state_next[topic] is not None
            self._state_next[topic] = job
        else:
            self._state_next[topic] = None
            self._dispatch(f"state {topic}", job)

    def _state_finished(self, topic: str, revision: int) -> None:
        self._out.state_done(topic, revision)
        job = self._state_next.pop(topic, None)
        if job is not None:
            self._state_next[topic] = None
            self._dispatch(f"state {topic}", job)

    def _state_ack(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        self._out.confirmed(body, number)

    def _taken(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        self._link.ring_taken(number)

    # -- losses -------------------------------------------------------------------------------------------------

    def _gap(self, channel: int, first: int, last: int) -> None:
        self._link.report_gap(GapError(first, last, peer=self._out.peer, channel=CHANNELS[channel]))
        self._out.want(channel, first)

    def _nack(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        self._out.again(channel, number)

    def _pulse(self, channel: int, number: int, body: Any, frames: Sequence[Any]) -> None:
        busy_s, label, next_numbers = body
        if type(label) is not str:
            raise TypeError("a pause without a name")
        self._link.pulse(number, float(busy_s), label)
        for index in (WORK, CALL, EVENT):
            inbox = self.inboxes[index]
            if next_numbers[index] > inbox.expected:
                self._gap(index, inbox.expected, next_numbers[index] - 1)
            self._repeat_lingering(index, inbox)

    def _repeat_lingering(self, channel: int, inbox: Inbox) -> None:
        """The sender still does not know of results that are a whole heartbeat old: their answer was lost."""
        kept = dict(inbox.results())
        for number in sorted(self._lingering[channel] & set(kept)):
            self._answer(channel, number, kept[number])
        self._lingering[channel] = set(kept)

    def end(self) -> None:
        """The peer is gone: what no handler has begun is dropped, what runs may finish, nobody gets its answer."""
        for lane in self._lanes.values():
            lane.clear()

    def cancel(self) -> int:
        """Stop what runs; returns how many handlers that were."""
        for task in list(self.tasks):
            task.cancel()
        return len(self.tasks)

    @property
    def running(self) -> int:
        return sum(inbox.running for inbox in self.inboxes)

    def statistics(self) -> Dict[str, Any]:
        return {
            "channels": {CHANNELS[index]: inbox.statistics() for index, inbox in enumerate(self.inboxes)},
            "state_skipped": self.latest.skipped,
            "handler_failures": self.failures,
            "events_unhandled": self.unhandled_events,
        }


def _remote(kind: str, text: str, facts: Dict[str, Any]) -> BusError:
    """A schema error of the peer stays one here; everything else is a RemoteError."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.SchemaError):
        return known(text, **facts)
    return RemoteError(kind, text, **facts)
