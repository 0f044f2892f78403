"""Many examples of each decoder: `python -m tests.fuzz --examples 100000`. `--only NAME --seed N` replays one."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import Broken
from tests.fuzz.decoders import NAMES, case, fuzzing, seeded

SHOWN = 5
"""Failing seeds of one decoder that are printed."""


def run(name: str, seeds: range) -> dict[str, Any]:
    """Figures of one decoder: how many inputs were refused, which seeds broke it and how."""
    under_fuzz = case(name)
    refused, broken = 0, []
    begun = time.perf_counter()
    with fuzzing():
        for seed in seeds:
            try:
                refused += under_fuzz.try_one(seeded(name, seed))
            except Broken as error:
                broken.append([seed, str(error)])
    return {"decoder": name, "examples": len(seeds), "refused": refused, "broken": broken,
            "seconds": round(time.perf_counter() - begun, 1)}


def replay(name: str, seed: int) -> int:
    """One example, with its error and what that came from."""
    with fuzzing():
        try:
            refused = case(name).try_one(seeded(name, seed))
        except Broken:
            traceback.print_exc()
            return 1
    print("refused" if refused else "accepted")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="of each decoder")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=NAMES, metavar="NAME", action="append",
                        help=f"may be repeated; one of: {', '.join(NAMES)}")
    parser.add_argument("--seed", type=int, help="replay this example of --only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.seed is not None:
        if options.only is None or len(options.only) > 1:
            parser.error("--seed belongs to one decoder: name it with --only")
        return replay(options.only[0], options.seed)
    seeds = range(options.first, options.first + options.examples)
    names = options.only or NAMES
    found = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for figures in pool.map(partial(run, seeds=seeds), names):
            found.append(figures)
            share = figures["refused"] / max(1, figures["examples"])
            print(f"{figures['decoder']:30} {figures['examples']:8} examples {figures['seconds']:8.1f} s  "
                  f"{share:6.1%} refused  {len(figures['broken']):6} broken", flush=True)
            for seed, text in figures["broken"][:SHOWN]:
                print(f"    --seed {seed}: {text[:300]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(figures["broken"] for figures in found) else 0


if __name__ == "__main__":
    sys.exit(main())
