"""The asker's end of one connection to a raw server."""

from __future__ import annotations

import socket
from typing import Any

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.wire import same
from cosmos_actor.bus.errors import BulkGone, CorruptFrame
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.raw_socket import host_and_port, receive, send, set_up, shut


class RawConnection:
    """One connection, used by one thread. Every wait in it ends within `patience_s` with an OSError."""

    def __init__(self, address: str, patience_s: float) -> None:
        """Dial and take the greeting. Raises CorruptFrame when somebody else listens there."""
        self.socket = socket.create_connection(host_and_port(address), timeout=patience_s)
        try:
            set_up(self.socket, patience_s)
            greeting = receive(self.socket, wire.GREETING_BYTES)
            if not greeting:
                raise ConnectionError("who listens there hung up at once")
            self._challenge = wire.unpack_greeting(greeting)
        except BaseException:
            self.socket.close()
            raise
        self._number = 0

    def ask(self, kind: int, ref: BulkRef, first: int, length: int) -> wire.Ask:
        self._number = (self._number + 1) % (1 << 32)
        ask = wire.Ask(kind, self._number, ref.arena, ref.generation, first, length)
        send(self.socket, wire.pack_ask(ask, ref.token, self._challenge))
        return ask

    def answer(self, ask: wire.Ask, ref: BulkRef) -> wire.Answer:
        """The head of the answer; what follows it is the caller's to take. Raises BulkGone for a No."""
        data = receive(self.socket, wire.ANSWER_BYTES)
        if not data:
            raise ConnectionError("the connection was closed")
        answer = wire.unpack_answer(data, ask)
        if answer.status == wire.NO:
            reason = receive(self.socket, answer.length).decode(errors="replace")
            raise BulkGone(f"{ref}: {reason}", peer=ref.owner, channel="weights")
        return answer

    def text(self, ask: wire.Ask, ref: BulkRef) -> bytes:
        """What an answer other than an array's bytes says, proved to come from who has the array."""
        answer = self.answer(ask, ref)
        said = receive(self.socket, answer.length) if answer.length else b""
        if not same(answer.digest, wire.answer_digest(ask, ref.token, self._challenge, said)):
            raise CorruptFrame("an answer comes from somebody who has not the array", peer=ref.owner)
        return said

    def holds(self, ask: wire.Ask, answer: wire.Answer, ref: BulkRef, payload: Any) -> bool:
        """Whether the answer and, if it was asked for under a digest, its bytes come from who has the array."""
        covered = payload if ask.kind == wire.DIGESTED else b""
        return same(answer.digest, wire.answer_digest(ask, ref.token, self._challenge, covered))

    def close(self) -> None:
        shut(self.socket)
        self.socket.close()
