"""Standard input as something that ends: a bounded read with a deadline."""

from __future__ import annotations

import os
import select
import time
from typing import Optional

from .mistakes import Mistake

MOST_BYTES = 1 << 20
"""A device or a flood there would be read for ever."""
READ_BYTES = 1 << 16


def read_whole(what: str, deadline_s: float) -> bytes:
    """All of it up to its end. Raises Mistake, which says `what`: the end does not come in time, or far too late."""
    until, content = time.monotonic() + deadline_s, b""
    while True:
        part = read_part(max(0.0, until - time.monotonic()))
        if part is None:
            raise Mistake("{} did not come to its end on standard input within {:g} s".format(what, deadline_s))
        if not part:
            return content
        content = _more(content, part, what)


def read_line(what: str, deadline_s: float) -> bytes:
    """Up to the end of the first line; it stays open. Raises Mistake as `read_whole` does, and where there is none."""
    until, content = time.monotonic() + deadline_s, b""
    while not content.endswith(b"\n"):
        part = read_part(max(0.0, until - time.monotonic()))
        if not part:
            raise Mistake("{} did not come on standard input{}".format(
                what, ", which is at its end" if part == b"" else " within {:g} s".format(deadline_s)))
        content = _more(content, part, what)
    return content


def read_part(timeout_s: Optional[float]) -> Optional[bytes]:
    """What there is; empty at its end, and where it can not be read; None: nothing came in time."""
    try:
        if not select.select([0], [], [], timeout_s)[0]:
            return None
        return os.read(0, READ_BYTES)
    except (OSError, ValueError):
        return b""


def _more(content: bytes, part: bytes, what: str) -> bytes:
    content += part
    if len(content) > MOST_BYTES:
        raise Mistake("{}: more than {} bytes on standard input".format(what, MOST_BYTES))
    return content
