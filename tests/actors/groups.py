"""Small groups of trajectories for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_actor.actors.trajectory import TrajectoryGroup


def make_group(
    number: int = 0, lengths: tuple[int, ...] = (2, 3, 1), version: int = 0, **fields: Any
) -> TrajectoryGroup:
    """A group whose contents are a function of its number."""
    total = sum(lengths)
    rng = np.random.default_rng(number)
    made: dict[str, Any] = {
        "group_id": f"g{number:06d}",
        "attempt": 0,
        "task": {"answer": number},
        "prompt": rng.integers(0, 16, 4).astype(np.int32),
        "lengths": np.array(lengths, np.int32),
        "tokens": rng.integers(0, 16, total).astype(np.int32),
        "logprobs": -rng.random(total).astype(np.float32),
        "versions": np.full(total, version, np.int32),
        "version_dispatch": version,
        "finished": np.ones(len(lengths), np.uint8),
        "texts": [f"answer {i}" for i in range(len(lengths))],
    }
    return TrajectoryGroup(**{**made, **fields})
