"""All that the weight plane is to be measured for where there are GPUs, in one go and within a bound.

    python benchmarks/on_gpus.py [--models 0.6b,8b] [--within 285] [--each 75] [--out DIR]

One GPU gives `cuda_ipc`, two give `nccl` as well. What matters most comes first; what fails, or takes longer than
--each seconds, costs its own figures, is named at the end, and makes the exit code 1. So does what is not begun any
more after --within seconds in all. DIR has a JSON file for each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from weights_table import within

HERE = Path(__file__).resolve().parent


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", default="0.6b,8b")
    options.add_argument("--ways", default="", help="cuda_ipc,nccl; empty: what the GPUs here allow")
    options.add_argument("--within", type=float, default=285.0, help="seconds")
    options.add_argument("--each", type=float, default=75.0, help="seconds")
    options.add_argument("--out", type=Path, default=Path("build/gpus"))
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    until = time.monotonic() + chosen.within
    failed = []
    for name, command in programs(chosen.models.split(","), chosen.ways.split(",") if chosen.ways else ways_here()):
        begun = time.monotonic()
        limit = min(chosen.each, until - begun)
        print(f"== {name}", flush=True)
        problem = within(limit, [sys.executable, *command, "--json", chosen.out / f"{name}.json"]) if limit > 1 else (
            "not begun: the time is over")
        print(f"== {name}: {problem or 'done'}, {time.monotonic() - begun:.0f} s", flush=True)
        failed += [f"{name}: {problem}"] if problem else []
    print("\n".join(failed) or "all of it was measured")
    return 1 if failed else 0


def programs(models: list[str], ways: list[str]) -> list[tuple[str, list[object]]]:
    """(name, command without the interpreter)"""
    made: list[tuple[str, list[object]]] = []
    for model in models:
        made += [(f"refresh-{model}-{way}", [HERE / "refresh.py", "--model", model, "--way", way]) for way in ways]
        made += [(f"weights-{model}-{part}", [HERE / "weights.py", "--model", model, "--part", part])
                 for part in (*ways, "copies")]
    return made


def ways_here() -> list[str]:
    import torch

    return ["cuda_ipc", "nccl"][: torch.cuda.device_count()]


if __name__ == "__main__":
    sys.exit(main())
