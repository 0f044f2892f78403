"""Run where lerobot is: what its reader gives of a dataset, as a .npz. read_lerobot.py FOLDER OUT"""

from __future__ import annotations

import sys

import numpy as np
import torch

# torchvision's wheel is of another build than a CPU's torch: its operators do not load, and it refuses to be imported
# because two of them have no name. Nothing of them is used.
library = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    library.define(operator + "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402

dataset = LeRobotDataset("local/demonstrations", root=sys.argv[1],
                         delta_timestamps={"action": [0.0, 0.05]} if "chunks" in sys.argv[3:] else None)
columns: dict[str, list[object]] = {}
for row in range(len(dataset)):
    for name, value in dataset[row].items():
        columns.setdefault(name, []).append(value.numpy() if isinstance(value, torch.Tensor) else value)
statistics = {f"stats/{key}/{name}": value for key, of in dataset.meta.stats.items() for name, value in of.items()}
np.savez(sys.argv[2], **{name: np.stack(values) for name, values in columns.items()}, **statistics,
         fps=dataset.fps, episodes=dataset.num_episodes)
