"""What an engine's statistics say of the rounding of its weights, by name. No torch."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "fp8/"


def rounding_in(statistics: Mapping[str, float]) -> dict[str, float]:
    """KIND/rms and KIND/max of each kind of layer; empty for an engine that rounds nothing."""
    return {name.removeprefix(PREFIX): value for name, value in statistics.items() if name.startswith(PREFIX)}
