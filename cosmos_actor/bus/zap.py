"""The allow-list at the door: a client's key is on it or its connection ends before a byte of ours is read."""

from __future__ import annotations

from binascii import Error as BinasciiError
from typing import Any, List

import zmq
from zmq.utils import z85

from .keys import KeyRing
from .socket import ZAP_DOMAIN


def answer(request: List[bytes], keys: KeyRing) -> List[bytes]:
    """The ZAP reply (RFC 27) to a request; the user id of an allowed client is its key's role."""
    version, request_id = request[0], request[1]
    role = _role(request, keys)
    if role is None:
        return [version, request_id, b"400", b"key not on the list", b"", b""]
    return [version, request_id, b"200", b"OK", role.encode(), b""]


def _role(request: List[bytes], keys: KeyRing) -> Any:
    if len(request) != 7 or request[2] != ZAP_DOMAIN or request[5] != b"CURVE":
        return None
    try:
        return keys.role_of(z85.encode(request[6]).decode())
    except (ValueError, BinasciiError):
        return None


class Doorkeeper:
    """Answers libzmq's questions."""

    def __init__(self, socket: Any, keys: KeyRing) -> None:
        self.socket = socket
        self.keys = keys
        self.allowed = 0
        self.turned_away = 0

    def on_readable(self) -> None:
        """Answer every question that the socket has."""
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self.answer_one()

    def answer_one(self) -> None:
        """Call it when the socket has a question."""
        reply = answer(self.socket.recv_multipart(zmq.NOBLOCK), self.keys)
        self.allowed += reply[2] == b"200"
        self.turned_away += reply[2] != b"200"
        self.socket.send_multipart(reply, zmq.NOBLOCK)
