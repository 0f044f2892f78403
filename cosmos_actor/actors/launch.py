"""Start the ranks of one actor under torch's elastic launcher, such that no rank outlives it.

    python -m cosmos_actor.actors.launch --ranks 2 -- python -m package.of.the.role --spec FILE

Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and calls `cosmos_actor.death.install()`
first thing: the launcher puts it into a session of its own, and there a signal to the actor's process group does not
reach it. When one rank ends badly the launcher ends the others and itself; whether to start again is the supervisor's
decision, not the launcher's.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from cosmos_actor import death

MONITOR_S = 0.1
"""How soon the death of a rank is seen."""
SHUTDOWN_S = 5
"""From SIGTERM to SIGKILL for ranks; below the `shutdown_s` of an actor, so that the launcher is not killed first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks to their end; 0 if all ended well. The last line names the rank that failed first."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.ranks < 1 or options.command[:1] != ["--"] or len(options.command) < 2:
        parser.error("at least one rank and a command after -- are needed")
    if not death.install():
        os.environ[death.SUPERVISOR] = death.describe(os.getpid(), secrets.token_hex(8))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    return _run(options.ranks, options.command[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cosmos_actor.actors.launch", description="Start the ranks of one actor.")
    parser.add_argument("--ranks", type=int, required=True, help="processes of the group")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command of each rank")
    return parser


def _run(ranks: int, command: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    configuration = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=secrets.token_hex(8), max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", monitor_interval=MONITOR_S)
    try:
        elastic_launch(configuration, entrypoint=command[0])(*command[1:])
    except SignalException as stop:
        return 128 + stop.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(_describe(rank, ranks, failure.exitcode), file=sys.stderr, flush=True)
        return 1
    return 0


def _describe(rank: int, ranks: int, exitcode: int) -> str:
    """Begins with "error:" only where the rank itself can not have said why, so that its own words stay the reason."""
    if exitcode < 0:
        return f"error: rank {rank} of {ranks} was killed by {signal.Signals(-exitcode).name}"
    return f"rank {rank} of {ranks} ended with exit code {exitcode}"


if __name__ == "__main__":
    sys.exit(main())
