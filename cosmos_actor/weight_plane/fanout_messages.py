"""What a reader of weights and the controller say to each other so that readers pass buckets on. Metadata only.

    reader -> controller   BucketWanted     call: whom do I take this bucket from?  -> BucketSource
                           BucketTaken      event: I have it, and here others find it
                           BucketsDropped   event: I do not have, or do not want, these any more
"""

from __future__ import annotations

from cosmos_actor.bus.bulk.ref import BulkRef
from cosmos_actor.bus.schema import schema

PUBLISHER = ""
"""Name of the source that every bucket has."""

SILENT, GONE, REFUSED, CORRUPT = "silent", "gone", "refused", "corrupt"
"""Why a source was given up: nothing came; it has let go of the bucket or ended; its key is not its role's; its bytes
are not the manifest's."""


def name_of(ref: BulkRef) -> bytes:
    """A bucket, by the publisher's reference: 16 bytes of its arena and 8 of a generation that it gives once."""
    return ref.arena + ref.generation.to_bytes(8, "little")


@schema("bucket_wanted", version=1)
class BucketWanted:
    bucket: bytes
    """See `name_of`."""
    nbytes: int
    publisher_host: str
    refused: list[str]
    """Relays that this reader does not take it from: it could not be had from them, or they could not be reached."""
    problem: str
    """With the last of them; empty: none was tried, or it has been said."""


@schema("bucket_source", version=1)
class BucketSource:
    """Without `ready` nobody has it yet who has a hand free: ask again."""

    ready: bool
    relay: str
    """Name of the reader to take it from, or PUBLISHER."""
    ref: BulkRef | None
    """Where the relay has it; None for the publisher."""
    silent_s: float
    """A relay from which nothing came for so long is given up."""
    keep: bool
    """Whether others will want it of this reader."""


@schema("bucket_taken", version=1)
class BucketTaken:
    bucket: bytes
    ref: BulkRef | None
    """Where others find it; None: it was not kept."""


@schema("buckets_dropped", version=1)
class BucketsDropped:
    buckets: list[bytes]
    publisher_failed: bool
    """The publisher itself could not be read: nobody need wait for its turn there."""
