"""How a digest is shown, by every command, log and error alike. The standard library alone: commands import it."""

from __future__ import annotations

DIGITS = 12
"""Hexadecimal digits: enough to tell versions of a run from each other, few enough to compare by eye."""


def shown(digest: str, nothing: str = "unknown") -> str:
    """The first digits of `digest`, or `nothing` for none."""
    return digest[:DIGITS] or nothing
