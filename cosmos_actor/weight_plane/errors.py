"""Every error of the weight plane, in one tree below the bus's."""

from __future__ import annotations

from cosmos_actor.bus.errors import BusError


class WeightError(BusError):
    """A version of the weights that can not be taken or given; whoever held a version before, still holds it."""


class VersionNotNewer(WeightError):
    """Versions only grow: this one is the one held, or older."""


class ForeignRun(WeightError):
    """The version belongs to another run."""


class ManifestInvalid(WeightError):
    """The manifest contradicts itself; nothing was fetched."""


class WeightsCorrupt(WeightError):
    """A tensor arrived with other bytes than the manifest says; `tensor` is its name."""

    def __init__(self, tensor: str, text: str, **facts: str | None) -> None:
        super().__init__(f"tensor {tensor}: {text}", **facts)
        self.tensor = tensor


class DeltaInvalid(WeightError):
    """A delta that is damaged, cut off or of other weights. Nothing of it was taken; the version can be had whole."""


class WeightsLate(WeightError):
    """A version was announced to a reader long ago, and it still has not taken it."""


class DigestMismatch(WeightError):
    """The engine holds something else than the manifest says."""
