"""Every number of the bus, with its unit and the failure it prevents."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .errors import BusError

KIB = 1024
MIB = 1024 * KIB
MAY_BE_ZERO = ("shared_bytes", "busy_poll_us")


@dataclass(frozen=True)
class Limits:
    """Frozen; a value that cannot work is refused with its name."""

    max_message_bytes: int = 1 * MIB
    """Larger messages delay every other one on the link; arrays go over the bulk plane instead."""

    work_window_messages: int = 1024
    """Work that one sender may have unfinished at us: bounds what a slow consumer must hold."""

    work_window_bytes: int = 64 * MIB
    """The same in bytes: a thousand large messages are not a thousand small ones."""

    call_window_messages: int = 256
    """Unanswered calls of one peer; a caller in a broken loop is stopped here."""

    event_window_messages: int = 4096
    """Events of one peer not yet handled."""

    state_topics: int = 1024
    """Topics of one link: each keeps its latest value for ever."""

    idempotency_keys: int = 1024
    """Answers kept per link for repeated keys; older ones are forgotten first."""

    default_deadline_s: float = 30.0
    """For waits whose caller gave none; nothing waits for ever."""

    heartbeat_interval_s: float = 1.0
    """How often a bus says that its loop runs."""

    lost_after_s: float = 10.0
    """Silence after which a peer is lost for good. Below about 5 s, a swapping machine kills healthy peers."""

    handshake_s: float = 4.0
    """A peer that has not introduced itself by then is dropped; a refused one is told sooner than 5 s."""

    redial_first_s: float = 0.02
    redial_last_s: float = 0.5
    """Pause between two attempts to reach a peer, doubling from first to last: no busy loop while it restarts."""

    batch_messages: int = 128
    """Small messages sent in one piece: at 128 the cost of a send is a few percent of a message's."""

    batch_bytes: int = 128 * KIB
    """A batch is sent when it holds this much, so that it stays under the receiver's largest frame."""

    drain_messages: int = 256
    """Pieces read from one socket before other sockets and tasks get their turn."""

    shared_bytes: int = 1 * MIB
    """Shared memory of a wire between two processes of a host, for arrays below the bulk threshold. 0: none is used."""

    busy_poll_us: int = 500
    """How long a loop stays awake for the next message after a call to, or an answer for, a process of the same host.
    0: it sleeps at once, and each round trip wakes two sleeping processors."""

    linger_ms: int = 500
    """How long a closing socket tries to get rid of what it accepted (goodbyes, last acknowledgements)."""

    min_descriptors: int = 512
    """Below it libzmq spins on accept() or aborts when the process runs out."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name not in MAY_BE_ZERO):
                raise BusError(f"{field.name} must be above 0", setting=f"bus.{field.name}")
        if self.work_window_bytes < self.max_message_bytes:
            raise BusError("work_window_bytes holds no whole message", setting="bus.work_window_bytes")
        if self.lost_after_s < 2 * self.heartbeat_interval_s:
            raise BusError("lost_after_s must be at least two heartbeats", setting="bus.lost_after_s")

    @property
    def max_frame_bytes(self) -> int:
        """What a receiver lets in at all: a batch that was just under its size plus one more message."""
        return self.max_message_bytes + self.batch_bytes + 64 * KIB
