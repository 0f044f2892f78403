"""Models that two processes can both make."""

from __future__ import annotations

import numpy as np


def large_model(seed: int) -> dict[str, np.ndarray]:
    """About 6 MiB in tensors of every size: some share a bucket, one is larger than a bucket, one is empty."""
    rng = np.random.default_rng(seed)
    model = {f"layers.{number}.weight": rng.standard_normal((256, 256)).astype(np.float32) for number in range(12)}
    model.update({f"layers.{number}.norm": rng.integers(0, 1 << 16, 256).astype(np.uint16) for number in range(12)})
    model["embed"] = rng.standard_normal((3000, 256)).astype(np.float32)
    model["nothing"] = np.zeros((0, 3), np.float32)
    model["scale"] = np.array(seed, np.float64)
    return model
