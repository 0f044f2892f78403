"""One actor's end of the bulk plane, as its bus uses it: large arrays out, references in, and everything given back.

    sender     externalise   arrays over the threshold go into the store, held for the receiver; references are lent on
    receiver   resolve       references become arrays; each is given back when the last view of it is dropped
               or borrow     references stay references; each is given back by `release`, or when it is dropped
    both       given_back    word from a peer;  peer_lost: it will never send word
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Deque, Dict, List, Optional, Sequence, Tuple

from ..codec import Encoding
from ..errors import BulkGone
from ..identity import Identity, host_id
from ..keys import KeyRing
from ..schema import codec_of, schema, to_plain
from .loans import Key, LoanTable, Returns
from .reader import BulkReader
from .ref import BulkRef
from .server import BulkServer
from .settings import BulkSettings
from .store import BulkStore
from .streams import StreamClient

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

GiveBack = Callable[[str, "Returned"], None]


@schema("bulk_returned", version=1)
class Returned:
    """Arrays that the sender of this no longer uses: (arena, generation, how many loans of it end)."""

    arrays: List[Tuple[bytes, int, int]]


class BulkPlane:
    """What a peer was given is kept for it until it gave it back or is lost, and what came from one is given back once.

    Used by one event loop; only the dropping of arrays may happen in any thread.
    """

    returned_type = Returned

    def __init__(
        self, identity: Identity, settings: Optional[BulkSettings] = None, keys: Optional[KeyRing] = None
    ) -> None:
        self.settings = settings or BulkSettings()
        self.store = BulkStore(identity, self.settings)
        self.reader = BulkReader(self.settings, StreamClient(self.settings, keys))
        self.server = BulkServer(self.store, keys)
        self._loans = LoanTable()
        self._references: Dict[int, Any] = {}
        """id of a borrowed reference -> its finalizer."""
        self._dropped: Deque[Key] = deque()
        self._give_back: GiveBack = lambda peer, returned: None

    def start(self, listen: Optional[str], give_back: GiveBack) -> None:
        """Serve other hosts beside the bus's own address (`tcp://HOST:...`); `give_back(peer, Returned)` sends word."""
        self._loop = asyncio.get_running_loop()
        self._give_back = give_back
        if listen is not None and listen.startswith("tcp://"):
            self.server.start(listen.rpartition(":")[0] + ":0")

    def close(self) -> None:
        """Nothing is lent or served any more. Arrays that a handler still has stay readable."""
        self._give_back = lambda peer, returned: None
        self.server.close()
        self.reader.close()
        self.store.close()

    def statistics(self) -> Dict[str, Any]:
        return {"store": self.store.statistics(), "reader": self.reader.statistics(),
                "server": self.server.statistics(), "loans": self._loans.statistics()}

    # -- out ----------------------------------------------------------------------------------------------------

    def concerns(self, encoding: Encoding, inline_bytes: int) -> bool:
        """Whether `externalise` has anything to do; `inline_bytes` is what a message may hold itself."""
        if encoding.references:
            return True
        nbytes = 0
        for array in encoding.arrays:
            nbytes += array.nbytes
        return nbytes > min(self.settings.threshold_bytes, inline_bytes)

    async def externalise(
        self, encoding: Encoding, taker: str, taker_host: str, inline_bytes: int, deadline_s: float
    ) -> List[BulkRef]:
        """Replace large arrays in the encoding by references that `taker` holds; all references it holds from now on.

        Raises DeadlineExceeded or BulkFull naming `bulk.budget_bytes`; nothing is held then.
        """
        lent: List[BulkRef] = []
        try:
            for reference in encoding.references:
                self._lend(reference, taker, lent)
            if self.store.address or taker_host == host_id():
                for index in self._too_large(encoding, inline_bytes):
                    array, slot = encoding.arrays[index], encoding.slots[index]
                    ref = await self.store.put(array, holder=taker, deadline_s=deadline_s, dtype=slot[1])
                    lent.append(ref)
                    slot[:] = [-1, "bulk_ref", codec_of(ref).encode(ref, Encoding())]
                _renumber(encoding)
        except BaseException:
            self.take_back(lent, taker)
            raise
        return lent

    def lend_again(self, refs: Sequence[BulkRef], taker: str) -> None:
        """The same message goes to the same taker once more. Raises BulkGone when an array ended."""
        lent: List[BulkRef] = []
        try:
            for ref in refs:
                self._lend(ref, taker, lent)
        except BaseException:
            self.take_back(lent, taker)
            raise

    def take_back(self, refs: Sequence[BulkRef], taker: str) -> None:
        """A message with these never went out."""
        self.given_back(taker, Returned([(ref.arena, ref.generation, 1) for ref in refs]))

    # -- in -----------------------------------------------------------------------------------------------------

    def borrow(self, references: Sequence[Any], lender: str) -> None:
        """References that stay references: each is given back by `release`, or when the object is dropped."""
        for reference in references:
            self._loans.borrow(_key(reference), lender)
            finalizer = weakref.finalize(reference, self._drop, _key(reference), id(reference))
            finalizer.atexit = False
            self._references[id(reference)] = finalizer

    async def resolve(self, references: Sequence[Any], lender: str, deadline_s: float) -> List[NDArray[Any]]:
        """The arrays, read-only. A view is given back with its last reference, a streamed copy at once.

        Raises what `BulkReader.fetch` raises; everything is given back then.
        """
        for reference in references:
            self._loans.borrow(_key(reference), lender)
        return list(await asyncio.gather(*(self._resolve(reference, deadline_s) for reference in references)))

    def release(self, message: Any) -> None:
        """Give back every reference in a message that was borrowed. A second time has no effect."""
        for reference in to_plain(message)[2].references:
            finalizer = self._references.get(id(reference))
            if finalizer is not None:
                finalizer()
        self._flush()

    # -- word from peers ----------------------------------------------------------------------------------------

    def given_back(self, peer: str, returned: Returned) -> None:
        """`peer` does not use these any more."""
        for arena, generation, count in returned.arrays:
            if arena == self.store.arena_token:
                self.store.give_back(generation, peer, count)
            else:
                self._pass_back(self._loans.given_back((arena, generation), peer, count))

    def peer_lost(self, peer: Identity) -> None:
        """This life of the peer is over: what it held is free, its memory goes with the last view of it here."""
        self.store.drop_holder(str(peer))
        returns, orphans = self._loans.peer_lost(str(peer))
        if orphans:
            log.info("%d arrays that %s had lent are still used here; their memory may change", orphans, peer)
        self._pass_back(returns)
        self.reader.forget(peer.actor, peer.incarnation)

    # -- inside -------------------------------------------------------------------------------------------------

    def _lend(self, ref: Any, taker: str, lent: List[BulkRef]) -> None:
        if ref.arena == self.store.arena_token:
            self.store.add_holder(ref, taker)
        elif not self._loans.lend(_key(ref), taker):
            raise BulkGone(f"{ref} was given back before it was sent on", peer=taker)
        lent.append(ref)

    def _too_large(self, encoding: Encoding, inline_bytes: int) -> List[int]:
        """Indices of the arrays over the threshold, and of the largest others until the rest fits into a message."""
        by_size = sorted(range(len(encoding.arrays)), key=lambda index: -encoding.arrays[index].nbytes)
        left = sum(array.nbytes for array in encoding.arrays)
        chosen = []
        for index in by_size:
            nbytes = encoding.arrays[index].nbytes
            if nbytes <= self.settings.threshold_bytes and left <= inline_bytes:
                break
            chosen.append(index)
            left -= nbytes
        return chosen

    async def _resolve(self, ref: BulkRef, deadline_s: float) -> NDArray[Any]:
        key = _key(ref)
        try:
            return await self.reader.fetch(ref, deadline_s=deadline_s, on_drop=partial(self._drop, key))
        except BaseException:
            self._drop(key)
            raise

    def _drop(self, key: Key, number: Optional[int] = None) -> None:
        """Called in whatever thread drops the last reference."""
        if number is not None:
            self._references.pop(number, None)
        self._dropped.append(key)
        try:
            self._loop.call_soon_threadsafe(self._flush)
        except RuntimeError:
            pass  # The event loop was closed: no peer is left to hear of it.

    def _flush(self) -> None:
        returns: Returns = []
        while self._dropped:
            returns += self._loans.use_ended(self._dropped.popleft())
        self._pass_back(returns)

    def _pass_back(self, returns: Returns) -> None:
        by_lender: Dict[str, List[Tuple[bytes, int, int]]] = {}
        for lender, (arena, generation), count in returns:
            by_lender.setdefault(lender, []).append((arena, generation, count))
        for lender, arrays in by_lender.items():
            self._give_back(lender, Returned(arrays))


def _key(ref: Any) -> Key:
    return (ref.arena, ref.generation)


def _renumber(encoding: Encoding) -> None:
    """Arrays that stay in the message are numbered anew, in their order."""
    kept = [index for index, slot in enumerate(encoding.slots) if slot[0] >= 0]
    encoding.arrays = [encoding.arrays[index] for index in kept]
    encoding.slots = [encoding.slots[index] for index in kept]
    for number, slot in enumerate(encoding.slots):
        slot[0] = number
