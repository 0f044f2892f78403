"""A whole receiving side: wires that introduce themselves well or badly, and then say whatever they like.

The other decoders are looked at one by one; here they stand behind each other, with a real link, its handlers, its ring
and its lane. The wires are the fuzz's own, the event loop's own errors count.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from cosmos_actor.bus import Bus, Identity, Limits, MemoryNetwork, MemoryTransport
from cosmos_actor.bus.dialler import Dialler
from cosmos_actor.bus.envelope import (
    ACK,
    CALL,
    DATA,
    EVENT,
    FAILED,
    FLOOR,
    GOODBYE,
    HELLO,
    MESSAGE,
    NACK,
    PROTOCOL,
    PULSE,
    REFUSED,
    RESET,
    RESULT,
    STATE,
    STATE_ACK,
    TAKEN,
    WELCOME,
    WORK,
)
from cosmos_actor.bus.handshake import introduce, to_payload
from cosmos_actor.bus.identity import host_id
from cosmos_actor.bus.lane import NUMBER
from cosmos_actor.bus.schema import known_schemas, schema_key, to_plain
from cosmos_actor.bus.sharing import Sharing
from tests.bus.messages import Number, Observation
from tests.fuzz.case import Broken, Case, opened, until_the_end
from tests.fuzz.mutations import VALUES, changed_bytes, changed_value, packed
from tests.fuzz.wire import sealed

LIMITS = Limits(shared_bytes=64 * 1024, max_message_bytes=64 * 1024, work_window_messages=8, state_topics=4,
                busy_poll_us=0)
MESSAGE_BODY = [*schema_key(Number), list(to_plain(Number(3, "three"))[1]), None]
ITEMS: tuple[list[Any], ...] = (
    [MESSAGE, WORK, 1, 0, MESSAGE_BODY], [MESSAGE, WORK, 2, 0, MESSAGE_BODY], [MESSAGE, WORK, 9, 0, MESSAGE_BODY],
    [MESSAGE, CALL, 1, 0, [*MESSAGE_BODY[:4], "key"]], [MESSAGE, EVENT, 1, 0, MESSAGE_BODY],
    [MESSAGE, STATE, 1, 0, [*MESSAGE_BODY[:4], "topic"]], [MESSAGE, WORK, 1, 2, [*schema_key(Observation), [
        "e", [0, "uint8", [1, 1, 3]], [1, "float64", [1]], None, {"a": [1]}], None]],
    [RESULT, WORK, 1, 0, MESSAGE_BODY], [RESULT, CALL, 1, 0, MESSAGE_BODY], [FAILED, WORK, 2, 0, ["ValueError", "no"]],
    [ACK, WORK, 1, 0, 2], [ACK, EVENT, 1, 0, 1], [FLOOR, WORK, 2, 0, None], [NACK, WORK, 1, 0, None],
    [STATE_ACK, STATE, 1, 0, "topic"], [PULSE, WORK, 4, 0, [0.5, "compiling", [1, 2, 1]]], [TAKEN, WORK, 0, 0, None],
)
CONTROL: tuple[tuple[int, Any], ...] = ((GOODBYE, ["closed"]), (RESET, None), (REFUSED, ["no"]), (DATA, []), (9, []))


class FuzzWire:
    def __init__(self, name: str) -> None:
        self.name, self.role = name, None

    def send(self, frames: list[Any]) -> bool:
        return True

    def close(self) -> None:
        pass


class FuzzTransport(MemoryTransport):
    """Whoever is dialled is a wire of the fuzz. Shared memory is offered as between processes of one host."""

    between_processes = True

    def dial(self, address: str, role: str, owner: Any) -> Any:
        return FuzzWire(address)


class Session:
    """`listening`: the fuzz dials; else the bus dialled the fuzz. What was accepted stays accepted until it is done."""

    def __init__(self, listening: bool) -> None:
        self.loop = until_the_end(asyncio.new_event_loop())
        self.listening = listening
        self.errors: list[str] = []
        self.lives = 0
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(
            f"{context['message']}: {context.get('exception')!r}"))
        self.bus = Bus(Identity("run", "rollout", "rollout-0", "ours"), FuzzTransport(MemoryNetwork()), None,
                       limits=LIMITS)
        self.bus.serve(Number, lambda message, link: message)
        self.bus.serve(Observation, lambda message, link: None)
        self.bus.serve_event(Number, lambda message, link: None)
        self.bus.serve_state("topic", lambda message, link: None)
        self.loop.run_until_complete(self.bus.start("memory://fuzz"))
        self.bus.publish_state("ours", Number(1))
        opened.callback(lambda: self.loop.run_until_complete(self.bus.close(0)))

    # -- input ------------------------------------------------------------------------------------------------------

    def make(self, choose: random.Random) -> list[Any]:
        """[whether the introduction is changed, its seed, messages]; a message is frames, or bytes of the lane."""
        messages = [self._message(choose) for _ in range(choose.randint(1, 4))]
        return [choose.random() < 0.2, choose.randrange(2**32), messages]

    def _message(self, choose: random.Random) -> Any:
        how = choose.randrange(10)
        if how == 0:
            return [packed(choose.choice(VALUES)) for _ in range(choose.randint(1, 2))]
        if how == 1:
            return changed_bytes(bytes(64), [bytes(8)], choose)
        if how == 2:
            kind, payload = choose.choice(CONTROL)
            return sealed(packed([PROTOCOL, kind, changed_value(payload, choose), []]))
        items: Any = [choose.choice(ITEMS) for _ in range(choose.randint(1, 4))]
        places = choose.choice(([], [], [3, 8], [-1], [[0, 4096]], [[2**64 - 1, 0]]))
        changed = changed_value(items, choose) if how < 9 else items
        return sealed(packed([PROTOCOL, DATA, changed, places]), bytes(32 if places == [3, 8] else 0))

    # -- feeding ----------------------------------------------------------------------------------------------------

    def decode(self, made: list[Any]) -> None:
        self.loop.run_until_complete(self._decode(*made))
        if self.errors:
            texts, self.errors = self.errors, []
            raise Broken(texts[0])

    async def _decode(self, changed: bool, seed: int, messages: list[Any]) -> None:
        sharing = Sharing(LIMITS.shared_bytes)
        receipts: list[Any] = []
        link = None
        try:
            owner, wire = self._introduce(sharing, random.Random(seed) if changed else None)
            link = self.bus.links.get("controller-0")
            if link is not None and link.out.max_bytes > 100:
                receipts = [link.out.try_send(channel, link.out.pack(Number(1), None))
                            for channel in (WORK, WORK, CALL, EVENT)]
            for number, message in enumerate(messages, 1):
                self._feed(owner, wire, link, number, message)
                await asyncio.sleep(0)
            self._look(link, [receipt for receipt in receipts if receipt is not None])
        finally:
            sharing.close()
            for other in list(self.bus.links.values()):
                self.bus.link_over(other, "the example is over")
            for dialler in list(self.bus.diallers):
                dialler.stop()
            await asyncio.sleep(0)

    def _introduce(self, sharing: Sharing, choose: random.Random | None) -> tuple[Any, Any]:
        self.lives += 1
        owner: Any = self.bus._doorman
        session = f"session {self.lives}"
        if not self.listening:
            owner = Dialler(self.bus, "memory://peer", "controller", None)
            owner._first.add_done_callback(lambda first: first.cancelled() or first.exception())
            self.bus.diallers.add(owner)
            owner._dial()
            session = owner.session
        wire = FuzzWire("peer") if self.listening else owner._wire
        identity = Identity("run", "controller", "controller-0", f"life {self.lives}")
        plain = to_payload(introduce(identity, LIMITS, known_schemas(), host_id(), session, shared=sharing.offer()))
        if choose is not None:
            plain = changed_value(plain, choose)
        owner.wire_up(wire)
        owner.wire_frames(wire, sealed(packed([PROTOCOL, HELLO if self.listening else WELCOME, plain, []])))
        return owner, wire

    def _feed(self, owner: Any, wire: Any, link: Any, number: int, message: Any) -> None:
        if isinstance(message, list):
            owner.wire_frames(wire, [*message, NUMBER.pack(number)])
            return
        lane = None if link is None else link.sharing._lane_in
        if lane is not None:
            for frames in lane.split(message):
                if lane is link.sharing._lane_in:
                    owner.wire_frames(wire, frames)

    def _look(self, link: Any, receipts: list[Any]) -> None:
        for receipt in receipts:
            under_way = link.out.outboxes[receipt.channel]._entries
            if not receipt.done and receipt.number not in under_way:
                raise Broken(f"{receipt.message_id} is neither done nor under way: its sender waits for ever")
        if link is not None and link.out.latest.unconfirmed > LIMITS.state_topics:
            raise Broken("topics that nobody published")


def cases() -> list[Case]:
    listening, dialled = Session(listening=True), Session(listening=False)
    room = 4 * LIMITS.shared_bytes + 2 * 1024 * 1024
    return [
        Case("a link that was dialled to us", listening.make, listening.decode, (), room),
        Case("a link that we dialled", dialled.make, dialled.decode, (), room),
    ]
