"""Publishers, subscribers and relays that end between two chunks: `python -m tests.weight_plane.fan_out --points 100`;
1 if a promise breaks."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import owned_processes
from tests.weight_plane.fan_out.kills import WORLD, end_all, figures, points
from tests.weight_plane.fan_out.world import World


def table(found: dict[str, Any]) -> str:
    """For people."""
    heads = (("points", 8), ("reached", 9), ("took it", 9), ("kept old", 10), ("pull at most", 14),
             ("next at most", 14))
    lines = [" " * 19 + "".join(f"{head:>{width}}" for head, width in heads)]
    for kind, row in found["by_kind"].items():
        lines.append(f"{kind:19}{row['points']:8}{row['reached']:9}{row['took']:9}{row['kept']:10}"
                     f"{row['longest_s']:12.2f} s{row['longest_next_s']:12.2f} s")
    lines.append(f"{found['points']} points, {len(found['places'])} different places that were reached, deadline "
                 f"{found['deadline_s']:g} s, patience {found['patience_s']:g} s, {found['wall_s']:.0f} s in all")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=100, help="so many that were reached")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of victims and chunks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fan-out-"))
    owned, begun = owned_processes(), time.monotonic()
    popen = next(owned)
    try:
        outcomes = end_all(World(popen, folder, **WORLD), points(options.seed), options.points,
                           partial(print, flush=True))
    except AssertionError as error:
        print(f"BROKEN: {error}")
        return 1
    finally:
        next(owned, None)
        shutil.rmtree(folder)
    found = {"seed": options.seed, **figures(outcomes), "wall_s": round(time.monotonic() - begun, 1)}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for line in found["broken"]:
        print(f"BROKEN: {line}")
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
