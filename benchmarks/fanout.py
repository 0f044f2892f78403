"""A version of the weights to 1 and to N rollouts, each on a host of its own behind a shaped line, with and without
passing it on.

    python benchmarks/fanout.py [--rollouts 8] [--mib 64] [--rate 200mbit] [--json FILE]

Hosts are network namespaces at one switch (root, iproute2 and `tc` are needed). The trainer's upload is what its
interface sent, all layers included. Time is from the announcement to the last report of a verified version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the hosts and the actors are those that the tests use
os.chdir(ROOT)

from cosmos_actor.bus.bulk.settings import MIB  # noqa: E402
from tests.conftest import owned_processes  # noqa: E402
from tests.netns import skip_reason  # noqa: E402
from tests.star import sent_bytes, star  # noqa: E402
from tests.weight_plane.fan_out.world import World  # noqa: E402

WITHIN_S = 300.0
MOST_TIMES_ONE, MOST_COPIES = 2.0, 1.3


def measure(rollouts: int, fan_out: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds: seconds until the last rollout has it, and copies that the trainer sent."""
    names = [f"rollout-{number}" for number in range(rollouts)]
    owned = owned_processes()
    popen = next(owned)
    with star(["policy-0", *names, "controller-0"], options.rate, ["policy-0", *names]) as hosts:
        try:
            world = World(popen, Path(tempfile.mkdtemp()), mib=options.mib, fan_out=fan_out, hosts=hosts,
                          bucket_bytes=options.bucket_kib << 10 or None, patience_s=options.patience_s,
                          deadline_s=WITHIN_S, encrypt=not options.plain)
            for name in names:
                world.start_rollout(name)
            rounds = [one_version(world, hosts) for _ in range(options.rounds)]
            desk = world.desk_statistics()
        finally:
            next(owned, None)
    return {"rollouts": rollouts, "fan_out": fan_out, "seconds": median(found["seconds"] for found in rounds),
            "copies": median(found["copies"] for found in rounds), "rounds": rounds, "desk": desk}


def one_version(world: World, hosts: Any) -> dict[str, Any]:
    before = {name: sent_bytes(host) for name, host in hosts.items()}
    reports = world.everybody_takes(world.publish(), WITHIN_S)
    sent = {name: sent_bytes(host) - before[name] for name, host in hosts.items()}
    size = world.chunks * MIB
    relays = [sent[name] / size for name in world.rollouts]
    return {"seconds": max(report["after_s"] for report in reports.values()), "copies": sent["policy-0"] / size,
            "first_s": min(report["after_s"] for report in reports.values()), "most_copies_of_a_relay": max(relays)}


def table(found: list[dict[str, Any]], size: int) -> str:
    one = found[0]["seconds"]
    lines = [f"{'':34}{'seconds':>9}{'x one':>8}{'trainer sent':>14}{'copies':>8}{'a relay sent at most':>22}"]
    for row in found:
        name = f"{row['rollouts']} rollouts, {'passed on' if row['fan_out'] else 'each from the trainer'}"
        most = max(one_round["most_copies_of_a_relay"] for one_round in row["rounds"])
        lines.append(f"{name:34}{row['seconds']:9.2f}{row['seconds'] / one:8.2f}"
                     f"{row['copies'] * size / MIB:10.1f} MiB{row['copies']:8.2f}{most:15.2f} copies")
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rollouts", type=int, default=8)
    options.add_argument("--mib", type=int, default=64, help="size of a version")
    options.add_argument("--bucket-kib", type=int, default=0, help="of a bucket, which is what is passed on; 0 = "
                         "as the publisher chooses it")
    options.add_argument("--rate", default="200mbit", help="of each line, in each direction")
    options.add_argument("--rounds", type=int, default=3, help="versions")
    options.add_argument("--patience-s", type=float, default=3.0)
    options.add_argument("--plain", action="store_true", help="without CURVE: the processors of this machine have less "
                         "to do, the keyed digests stay")
    options.add_argument("--without", action="store_true", help="also N rollouts that each take it from the trainer")
    options.add_argument("--json", type=Path)
    options = options.parse_args()
    if skip_reason() is not None:
        print(f"fanout.py: {skip_reason()}", file=sys.stderr)
        return 2
    print(f"{os.cpu_count()} cores, {options.mib} MiB a version, {options.rate} a line, "
          f"{'no CURVE' if options.plain else 'CURVE'}, median of {options.rounds}", flush=True)
    cases = [(1, True), (options.rollouts, True)] + [(options.rollouts, False)] * options.without
    found = [measure(count, fan_out, options) for count, fan_out in cases]
    print(table(found, options.mib * MIB))
    times, copies = found[1]["seconds"] / found[0]["seconds"], found[1]["copies"]
    kept = times <= MOST_TIMES_ONE and copies <= MOST_COPIES
    print(f"bounds: {times:.2f} <= {MOST_TIMES_ONE} times one, {copies:.2f} <= {MOST_COPIES} copies: "
          f"{'kept' if kept else 'NOT KEPT'}")
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": str(options.json)},
                                            "cases": found}, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
