"""The bulk plane and the weight plane: references, asks and replies of streams, returned loans, manifests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack
import numpy as np

from cosmos_actor.bus import Identity
from cosmos_actor.bus.bulk.incoming import Incoming
from cosmos_actor.bus.bulk.plane import BulkPlane, Returned
from cosmos_actor.bus.bulk.reader import BulkReader
from cosmos_actor.bus.bulk.ref import BulkRef, storage_dtype
from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.bulk.wire import Ask, pack_ask, pack_chunk, pack_no, unpack_reply
from cosmos_actor.bus.codec import DTYPES
from cosmos_actor.bus.errors import BulkError, BusError, CorruptFrame, SchemaError
from cosmos_actor.bus.schema import decode, encode, pack, unpack
from cosmos_actor.weight_plane.base import Base
from cosmos_actor.weight_plane.comparing import compare
from cosmos_actor.weight_plane.delta import Delta
from cosmos_actor.weight_plane.delta import pack as pack_delta
from cosmos_actor.weight_plane.digest import raw, tensor_sums, weights_digest
from cosmos_actor.weight_plane.errors import DeltaInvalid, WeightError
from cosmos_actor.weight_plane.manifest import DeltaRef, Manifest, digest_of_entries, entries_of
from cosmos_actor.weight_plane.version import Version
from tests.fuzz.case import Broken, Case, Refused, until_the_end
from tests.fuzz.mutations import changed_bytes, changed_value, packed

SETTINGS = BulkSettings(budget_bytes=MIB, chunk_bytes=MIB, max_array_bytes=MIB)


def a_store() -> BulkStore:
    return until_the_end(BulkStore(Identity("run", "rollout", "rollout-0", "life"), SETTINGS))


def read(data: bytes) -> Any:
    """The message in these bytes; what is none is refused as the bus does it."""
    try:
        return decode(data, [])
    except (SchemaError, ValueError, TypeError) as error:
        raise Refused(str(error)) from None


def changed_message(data: bytes, choose: random.Random) -> bytes:
    """Its bytes or its values changed, under the right schema."""
    if choose.random() < 0.2:
        return changed_bytes(data, [data], choose)
    name, version, fingerprint, plain = unpack(data)
    return packed([name, version, fingerprint, changed_value(plain, choose)])


class References:
    """A reference that a peer made up is fetched here: by mapping its memory, and as the start of a stream."""

    def __init__(self) -> None:
        self.store = a_store()
        ref = self.store.try_put(np.arange(600, dtype=np.float32).reshape(20, 30), holder="fuzz")
        self.data = encode(ref)[0]
        self.loop = until_the_end(asyncio.new_event_loop())

    def make(self, choose: random.Random) -> bytes:
        return changed_message(self.data, choose)

    def decode(self, data: bytes) -> None:
        ref = read(data)
        if type(ref) is BulkRef:
            reader = BulkReader(SETTINGS)
            try:
                self.loop.run_until_complete(reader.fetch(ref, deadline_s=1.0)).copy()
            except BusError:
                self._begin_stream(ref)
                raise
            finally:
                reader.close()

    def _begin_stream(self, ref: BulkRef) -> None:
        """What the thread of streams does with it."""
        kind = storage_dtype(ref)
        if ref.nbytes <= SETTINGS.max_array_bytes:
            for ask in Incoming(ref, kind, b"12345678", SETTINGS).asks(0.0):
                pack_ask(ask, ref.token)


class Asks:
    """What a server is asked for: it answers or refuses, and sends no byte without the token."""

    def __init__(self) -> None:
        store = a_store()
        ref = store.try_put(np.arange(5000, dtype=np.uint8), holder="fuzz")
        self.server, self.token = BulkServer(store), ref.token
        self.ask = Ask(ref.arena, b"12345678", ref.generation, 0, 4096)
        self.captured = pack_ask(self.ask, ref.token)[0]

    def make(self, choose: random.Random) -> list[bytes]:
        if choose.random() < 0.4:
            return [changed_bytes(self.captured, [self.captured], choose)]
        if choose.random() < 0.1:
            return [self.captured] * choose.choice((0, 2, 3))
        return [packed(changed_value(unpack(self.captured), choose))]

    def decode(self, frames: list[bytes]) -> None:
        answer = self.server.answer(frames)
        if len(answer) == 2 and frames != [self.captured]:
            ask, proof = unpack(frames[0])[1:6], unpack(frames[0])[6]
            if pack_ask(Ask(*ask), self.token) != [pack([1, *ask, proof])]:
                raise Broken("bytes were sent without a proof")


class Replies:
    """What a server sends: only whole chunks of the right place get into the array."""

    def __init__(self) -> None:
        store = a_store()
        self.array = np.arange(5000, dtype=np.uint8)
        self.ref = store.try_put(self.array, holder="fuzz")
        self.first = Ask(self.ref.arena, b"12345678", self.ref.generation, 0, 5000)
        chunk = pack_chunk(self.first, self.array.tobytes(), self.ref.token)
        self.captured = [chunk, pack_no(self.first, "the lease ended")]
        self.heads = [frames[0] for frames in self.captured]

    def make(self, choose: random.Random) -> list[bytes]:
        head, *rest = choose.choice(self.captured)
        if choose.random() < 0.3:
            head = changed_bytes(head, self.heads, choose)
        elif choose.random() < 0.8:
            head = packed(changed_value(unpack(head), choose))
        elif rest:
            rest = [changed_bytes(rest[0], self.heads, choose)]
        return [head, *rest] if choose.random() < 0.95 else [head, *rest, head]

    def decode(self, frames: list[bytes]) -> None:
        incoming = Incoming(self.ref, np.dtype(np.uint8), b"12345678", SETTINGS)
        incoming.asks(0.0)
        incoming.take(unpack_reply(frames), 0.0)
        if incoming.complete and not np.array_equal(incoming.array, self.array):
            raise Broken("other bytes than were put became the array")


class Returns:
    """A peer gives back what it never had: nothing that others hold ends."""

    def __init__(self) -> None:
        self.plane = until_the_end(BulkPlane(Identity("run", "rollout", "rollout-0", "life"), SETTINGS))
        store = self.plane.store
        self.ref = store.try_put(np.arange(100), holder="someone else")
        self.data = encode(Returned([(store.arena_token, self.ref.generation, 1), (b"x" * 16, 1, 1)]))[0]

    def make(self, choose: random.Random) -> bytes:
        return changed_message(self.data, choose)

    def decode(self, data: bytes) -> None:
        returned = read(data)
        if type(returned) is Returned:
            self.plane.given_back("the peer", returned)
            held = self.plane.store.statistics()
            if held["leases"] != 1 or held["held_by"] != {"someone else": self.ref.nbytes}:
                raise Broken(f"others' arrays are held like this now: {held}")


class Manifests:
    """A manifest that passes its own check can be read into tensors."""

    def __init__(self) -> None:
        store = a_store()
        tensors = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float16),
                   "empty": np.zeros((0, 4), np.float32)}
        self.entries = entries_of(tensors, 1 << 16)
        bucket = store.try_put(np.zeros(self.entries[-1].offset + 64, np.uint8), holder="fuzz")
        self.manifest = Manifest(Version("run", 0, 1), digest_of_entries(self.entries), self.entries, [bucket])
        self.manifest.check()
        self.data = encode(self.manifest)[0]

    def make(self, choose: random.Random) -> bytes:
        return changed_message(self.data, choose)

    def decode(self, data: bytes) -> None:
        manifest = read(data)
        if type(manifest) is not Manifest:
            return
        manifest.version.require_newer_than(Version("run", 0, 0), "the fuzz")
        manifest.check()
        for entry in manifest.tensors:
            ref = manifest.buckets[entry.bucket]
            storage_dtype(ref)
            if ref.nbytes <= MIB and entry.view(np.zeros(ref.nbytes, np.uint8)).dtype != DTYPES[entry.dtype]:
                raise Broken("a tensor of another dtype")


class Deltas:
    """A delta is taken whole, and then the weights are the trainer's, or not at all."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.old = {"w": rng.integers(0, 1 << 16, 3000, np.uint16), "b": np.ones(500, np.float32)}
        new = {"w": self.old["w"] + (rng.random(3000) < 0.03).astype(np.uint16), "b": self.old["b"].copy()}
        new["b"][7] = 2.0
        self.sums = tensor_sums(self.old)
        facts = weights_digest(self.old), weights_digest(new)
        found = compare(new, {name: raw(array) for name, array in self.old.items()})
        self.payload = pack_delta(Delta((0, 1), (0, 2), *facts, found.parts)).tobytes()
        store = a_store()
        ref = store.try_put(np.frombuffer(self.payload, np.uint8), holder="fuzz")
        self.ref = DeltaRef(Version("run", 0, 1), Version("run", 0, 2), *facts, found.changed, ref, b"")
        self.head = 8 + int.from_bytes(self.payload[4:8], "little")
        self.header = self.payload[8 : self.head]

    def make(self, choose: random.Random) -> bytes:
        if choose.random() < 0.5:
            return changed_bytes(self.payload, [self.payload], choose)
        header = self.header
        if choose.random() < 0.7:
            header = packed(changed_value(msgpack.unpackb(header), choose))
        else:
            header = changed_bytes(header, [header], choose)
        return self.payload[:4] + len(header).to_bytes(4, "little") + header + self.payload[self.head :]

    def decode(self, data: bytes) -> None:
        base = Base(self.ref.base, self.old, self.sums)
        try:
            base.apply(self.ref, np.frombuffer(data, np.uint8))
        finally:
            known = (self.ref.digest, self.ref.base_digest)
            if weights_digest(base.tensors) != base.digest or base.digest not in known:
                raise Broken("a delta was taken in part")


def cases() -> list[Case]:
    references, asks, replies, returns, manifests = References(), Asks(), Replies(), Returns(), Manifests()
    deltas = Deltas()
    return [
        Case("bulk references", references.make, references.decode, (BusError,), 2 * MIB),
        Case("asks of a stream", asks.make, asks.decode, (CorruptFrame,)),
        Case("replies of a stream", replies.make, replies.decode, (CorruptFrame, BulkError)),
        Case("returned arrays", returns.make, returns.decode, ()),
        Case("weight manifests", manifests.make, manifests.decode, (WeightError, BulkError), MIB),
        Case("weight deltas", deltas.make, deltas.decode, (DeltaInvalid,), 2 * MIB),
    ]
