"""The digest of weights against SHA-256 and a copy in memory, one thread and all, numpy and torch.

    python benchmarks/digest.py [--mib 256] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cosmos_actor.weight_plane.digest import (
    add_changes,
    block_sums,
    combined_digest,
    tensor_digest,
    tensor_digests,
    threads,
)

ROUNDS = 7


def best_of(action: Callable[[], object]) -> float:
    """Seconds of the quickest round."""
    took = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        action()
        took.append(time.perf_counter() - begun)
    return min(took)


def on_host(nbytes: int) -> dict[str, float]:
    """Name -> seconds for so many bytes of bf16."""
    weights = np.random.default_rng(0).integers(0, 1 << 16, nbytes // 2, np.uint16)
    parts = {str(number): part for number, part in enumerate(np.split(weights, 16))}
    there = np.empty_like(weights)
    sha = lambda part: hashlib.sha256(part.data).digest()  # noqa: E731
    rng = np.random.default_rng(1)
    positions = np.sort(rng.choice(len(weights), len(weights) // 50, replace=False))
    old, sums = weights[positions], block_sums(weights.view(np.uint8))
    return {
        "copy, one thread": best_of(lambda: np.copyto(there, weights)),
        "SHA-256, one thread": best_of(lambda: sha(weights)),
        "SHA-256, all threads": best_of(lambda: list(threads().map(sha, parts.values()))),
        "digest, numpy, one thread": best_of(lambda: tensor_digest(parts["0"])) * 16,
        "digest, numpy, all threads": best_of(lambda: combined_digest(tensor_digests(parts))),
        "digest of 2 % changed, one thread": best_of(lambda: add_changes(sums, positions, old, old + np.uint16(1))),
    }


def on_device(nbytes: int, device: str) -> dict[str, float]:
    import torch

    from cosmos_actor.weight_plane.device_digest import block_sums_on

    torch.set_num_threads(os.cpu_count() or 1)
    weights = torch.randint(0, 1 << 15, (nbytes // 2,), dtype=torch.int16).to(device)
    there = torch.empty_like(weights)

    def waited(action: Callable[[], object]) -> Callable[[], object]:
        return lambda: (action(), torch.cuda.synchronize() if weights.is_cuda else None)

    return {f"copy, torch on {device}": best_of(waited(lambda: there.copy_(weights))),
            f"digest, torch on {device}": best_of(lambda: block_sums_on(weights).cpu())}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mib", type=int, default=256)
    options.add_argument("--device", default="cpu", help="of torch: cpu or cuda")
    options.add_argument("--json", type=Path)
    options = options.parse_args()
    nbytes = options.mib << 20
    found = {**on_host(nbytes), **on_device(nbytes, options.device)}
    print(f"{os.cpu_count()} cores, {options.mib} MiB of bf16, best of {ROUNDS}")
    for name, seconds in found.items():
        print(f"{name:34} {seconds * 1e3:8.1f} ms {nbytes / seconds / 2**30:8.2f} GiB/s")
    if options.json:
        rows = {name: {"seconds": seconds, "gib_s": nbytes / seconds / 2**30} for name, seconds in found.items()}
        facts = {"cores": os.cpu_count(), "mib": options.mib, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
