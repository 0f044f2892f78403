"""The taker's side of a collective of two, as a transport. Imports torch.

The thread of each publisher (see `asking`) makes the group, and takes part in the broadcasts one after the other.
"""

from __future__ import annotations

from typing import Any

import torch

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BulkGone, BusError, CorruptFrame
from cosmos_actor.weight_plane.transports import raw_wire as wire
from cosmos_actor.weight_plane.transports.asking import Asker, AskingTransport, Wish
from cosmos_actor.weight_plane.transports.interface import TransportLost
from cosmos_actor.weight_plane.transports.pair import BACKENDS, PairGroup, gone, take_part

PIECE_BYTES = 256 << 20
"""Of one broadcast: between two GPUs as quick as one of gigabytes, and who is silent is noticed within a bucket."""


class PairTransport(AskingTransport):
    """After a failure the next fetch makes a new group: one lost member costs its own fetches and nobody else's."""

    def __init__(self, settings: BulkSettings, backend: str = "nccl", device: str = "cpu") -> None:
        super().__init__(settings, torch.device(device))
        self.backend = backend

    def make_asker(self, address: str) -> Asker:
        return _Member(self, address)

    def late(self, asker: Asker, deadline_s: float) -> str:
        return (f"did not come by {self.backend} within {deadline_s:g} s: the other member of the group is silent"
                f" ({asker.doing})")

    async def lives(self, ref: BulkRef, *, deadline_s: float) -> None:
        """What was given was not freed meanwhile: the giver holds it until it is out."""

    def statistics(self) -> dict[str, Any]:
        return {**self.counts, "members": len(self._askers)}


class _Member(Asker):
    """This end's member of the group with one publisher."""

    thread_name = "pair-member"

    def __init__(self, transport: PairTransport, address: str) -> None:
        super().__init__(address, transport.settings.overdue_s)
        self._transport = transport
        self._group: PairGroup | None = None

    def fulfil(self, batch: list[Wish]) -> None:
        """All of them are asked for at once, so that the giver goes from one to the next without a word from here."""
        try:
            if batch:
                self._take(batch)
        except BulkGone as error:  # of the group itself
            problem: BusError = error
        except (OSError, CorruptFrame, TransportLost) as error:
            said = error.text if isinstance(error, BusError) else str(error) or type(error).__name__
            problem = TransportLost(f"did not come by {self._transport.backend} while {self.doing}: {said}")
        except Exception as error:  # The outermost loop of this thread: whoever waits is told instead of hanging.
            problem = TransportLost(f"did not come: {self._transport.backend} failed: {error!r}")
        else:
            return
        self.drop()
        for wish in [wish for wish in batch if not wish.told]:
            wish.tell(type(problem)(f"{wish.ref} {problem.text}", peer=wish.ref.owner, channel="weights"))

    def _take(self, batch: list[Wish]) -> None:
        if self._group is None:
            self._meet(batch[0].ref)
        connection, group = self._connection, self._group
        assert connection is not None and group is not None
        self.doing = "the publisher was asked for it"
        asks = [connection.ask(wire.PAIRED, wish.ref, PIECE_BYTES, wish.ref.nbytes) for wish in batch]
        for wish, ask in zip(batch, asks, strict=True):
            ref = wish.ref
            self.doing = "the publisher was asked for it"
            try:
                connection.text(ask, ref)
            except BulkGone as error:
                wish.tell(error)
                continue
            self.doing = "it was being broadcast"
            silent_s = self._overdue_s
            group.broadcast(wish.target, lambda: gone(connection.socket), silent_s, PIECE_BYTES)
            wish.tell()

    def _meet(self, ref: BulkRef) -> None:
        connection = self.dial()
        self.doing = "the group of two was being made"
        backend = self._transport.backend
        meeting = connection.text(connection.ask(wire.PAIR, ref, BACKENDS.index(backend), 0), ref)
        self._group = take_part(backend, meeting, connection.socket, self._transport.device)
        self._transport.counts["groups"] += 1

    def drop(self) -> None:
        """See Asker.drop. The group ends after its connection."""
        super().drop()
        if self._group is not None:
            self._group.close()
        self._group = None
