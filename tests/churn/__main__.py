"""Actors that come and go: `python -m tests.churn --seconds 120 --seed 0`. Exit code 1 if the run shows a fault.

A real `up` of a tiny recipe; every 2 to 4 seconds rollouts and rewards join or leave by SIGINT, SIGTERM, SIGKILL (also
before they are there) or SIGSTOP with SIGCONT. Then the same run undisturbed, whose losses must be the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.churn.trial import Trial, different_losses, faults, undisturbed
from tests.conftest import owned_processes


def churn(folder: Path, seconds: float, seed: int, *, least: int = 0) -> dict[str, Any]:
    """All figures, `faults` among them."""
    with contextlib.contextmanager(owned_processes)() as popen:
        trial = Trial(folder, popen, seed=seed)
        figures: dict[str, Any] = {"seed": seed, **trial.do(seconds, least=least)}
        calm, rate = undisturbed(folder, popen, steps=figures["steps"], at_most_s=figures["seconds"])
        figures["undisturbed_steps_per_s"] = round(rate, 2)
        figures["losses"] = different_losses(trial.run, calm)
    return {**figures, "faults": faults(figures)}


def table(figures: dict[str, Any]) -> str:
    rows = {**figures, **{f"held by {name}": held for name, held in figures["held"].items()},
            **{f"reason {number}": text for number, text in enumerate(figures["reasons"], 1)},
            **{f"fault {number}": text for number, text in enumerate(figures["faults"], 1)}}
    for name in ("held", "reasons", "faults"):
        del rows[name]
    return "\n".join(f"{name.replace('_', ' '):32} {json.dumps(value)}" for name, value in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it, logs and run directories included")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="churn-")))
        folder.mkdir(parents=True, exist_ok=True)
        figures = churn(folder, options.seconds, options.seed)
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
