"""Many schedules: `python -m tests.simulation --schedules 100000`. Failing seeds are shown; `--seed N` replays one."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.simulation.schedule import simulate

CHUNK = 200


def try_seeds(seeds: range) -> list[tuple[int, str]]:
    """(seed, what went wrong) of those that failed. What the bus logs about a bad network is not shown meanwhile."""
    before, failed = logging.root.manager.disable, []
    logging.disable(logging.CRITICAL)
    try:
        for seed in seeds:
            try:
                simulate(seed)
            except Exception as error:  # whatever it is, it belongs to the seed
                failed.append((seed, f"{type(error).__name__}: {error}"))
    finally:
        logging.disable(before)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, help="run this one alone, and let its error through")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.seed is not None:
        print(simulate(options.seed).plan)
        return 0
    begun = time.perf_counter()
    last = options.first + options.schedules
    chunks = [range(at, min(at + CHUNK, last)) for at in range(options.first, last, CHUNK)]
    failed = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for done, found in enumerate(pool.map(partial(try_seeds), chunks), 1):
            failed += found
            for seed, error in found:
                print(f"seed {seed}: {error}", flush=True)
            if done % 50 == 0:
                print(f"{done * CHUNK} schedules, {len(failed)} failed", flush=True)
    spent = time.perf_counter() - begun
    print(f"{options.schedules} schedules in {spent:.0f} s, {len(failed)} failed")
    if options.json:
        options.json.write_text(json.dumps({"schedules": options.schedules, "seconds": spent, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
