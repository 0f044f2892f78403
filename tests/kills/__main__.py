"""SIGKILL for actors of every role of one run: `python -m tests.kills --kills 200 --seed 0`; 1 if a promise breaks."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import owned_processes
from tests.job.runs import Run
from tests.kills.figures import broken
from tests.kills.killer import EndedEarly
from tests.kills.session import kill_all_over


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'actor':18}{'killed':>8}{'came back':>11}"]
    lines += [f"{actor:18}{counts['killed']:8}{counts['came_back']:11}" for actor, counts in found["actors"].items()]
    balance = found["balance"]
    rows = {
        "kills": f"{found['kills']}, {found['kills_while_starting']} of them while the actor was starting",
        "kill known to the supervisor": "median {median} ms, longest {max} ms".format(**found["found_ms"]),
        "other deaths": len(found["other_ends"]),
        "back to a checkpoint": f"{found['rewinds']} rewinds, {found['restarts_of_the_controller']} controllers",
        "steps": f"{found['steps']}, {len(found['steps_wrong'])} missing or twice",
        "ledger": f"{'balanced' if balance['balanced'] else 'NOT BALANCED'}: {balance['dispatched']} dispatched, "
                  f"{balance['trained']} trained, {sum(balance['dropped'].values())} dropped, "
                  f"{balance['buffered']} buffered, {balance['in_flight']} in flight",
        "trained twice": found["trained_twice"],
        "losses of an undisturbed run": "the same to the last bit" if found["same_losses"] else "OTHERS",
        "left behind": f"{len(found['left'])} processes, descriptors, files in /dev/shm, ports",
        "exit code": found["exit_code"],
        "wall time": f"{found['wall_s']:.0f} s",
    }
    return "\n".join([*lines, *(f"{name:30} {value}" for name, value in rows.items())])


@contextmanager
def processes() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """What starts processes that are gone when this is left, however it is."""
    owned = owned_processes()
    try:
        yield next(owned)
    finally:
        next(owned, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the choice of actors and moments")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    with processes() as popen:
        try:
            found = kill_all_over(Run(folder, popen), Run(folder, popen, "undisturbed"), options.kills, options.seed,
                                  told=partial(print, flush=True))
        except (EndedEarly, AssertionError) as error:
            print(f"{error}\nthe run is in {folder}")
            return 1
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    failures = broken(found)
    for promise in failures:
        print(f"BROKEN: {promise}")
    if failures:
        print(f"the run is in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
