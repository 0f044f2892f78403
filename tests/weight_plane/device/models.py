"""Models of torch's tensors that two processes can both make."""

from __future__ import annotations

import torch


def torch_model(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """About 3 MiB in tensors of every size and several dtypes: some fill blocks, most do not, one is empty."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {"embed": torch.randn(1000, 256, generator=draw)}
    for number in range(8):
        made[f"layers.{number}.weight"] = torch.randn(256, 256, generator=draw).to(torch.bfloat16)
        made[f"layers.{number}.norm"] = torch.randn(33, generator=draw).to(torch.bfloat16)
    made["odd"] = torch.randint(0, 255, (65537,), generator=draw, dtype=torch.uint8)
    made["nothing"] = torch.zeros(0, 3)
    made["scale"] = torch.tensor(float(seed), dtype=torch.float64)
    made["steps"] = torch.tensor([seed, 2, 3])
    return {name: tensor.to(device) for name, tensor in made.items()}
