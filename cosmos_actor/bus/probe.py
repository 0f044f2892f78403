"""Whether a process still listens somewhere, seen from outside."""

from __future__ import annotations

import asyncio


async def refuses(address: str, deadline_s: float) -> bool:
    """Whether the host of ``tcp://HOST:PORT`` answers that nobody listens there.

    False for every other outcome: the network may be bad, the host slow, somebody may be there.
    """
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), deadline_s)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, asyncio.TimeoutError):
        return False
    writer.close()
    return False
