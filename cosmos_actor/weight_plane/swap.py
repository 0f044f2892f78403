"""The moment an engine changes its weights: whole, and believed only when the engine's own digest says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cosmos_actor.weight_plane.errors import DigestMismatch
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.version import Version


class Engine(Protocol):
    """What a swap needs of an engine."""

    def load_weights(self, tensors: Mapping[str, Any], version: int, digest: str) -> str:
        """Take all tensors or none; return the digest of what the engine then really holds."""
        ...


@dataclass(frozen=True)
class WeightsHeld:
    """What an engine acts with, by its own account."""

    version: Version
    digest: str


def swap(engine: Engine, manifest: Manifest, tensors: Mapping[str, Any]) -> WeightsHeld:
    """Load the pulled tensors; the engine is told the version as `Version.ordinal`.

    Raises DigestMismatch when the engine reports another digest than the manifest's, and whatever the engine raises.
    """
    reported = engine.load_weights(tensors, manifest.version.ordinal, manifest.digest)
    if reported != manifest.digest:
        raise DigestMismatch(
            f"version {manifest.version} has digest {manifest.digest[:16]}, the engine reports {reported[:16]}"
        )
    return WeightsHeld(manifest.version, reported)
