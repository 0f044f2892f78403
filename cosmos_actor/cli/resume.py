"""What of a run must be whole before it can go on. Looks and changes nothing; imports no torch.

Weights and the replay buffer are verified by the roles that load them: they may be larger than a person wants to wait.
"""

from __future__ import annotations

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.ledger import Ledger, LedgerError, LedgerUnusable
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.job.checkpoints import Checkpoint, Checkpoints
from cosmos_actor.recipes.settings import RunSettings


def resumable(settings: RunSettings, paths: RunPaths) -> list[str]:
    """What a person should know and can not mend, one line each. Raises UserError naming the file that is not whole."""
    latest = Checkpoints(paths, keep_last=1).latest()
    steps = {line.get("step") for line in read_json_lines(paths.metrics)}
    if latest is None:
        return []
    _need_ledger(settings, paths, latest)
    lost = sorted(set(range(1, latest.step + 1)) - steps)
    return [f"{paths.metrics} has no line of {len(lost)} steps between {lost[0]} and {lost[-1]}; the run goes on "
            "without them"] if lost else []


def _need_ledger(settings: RunSettings, paths: RunPaths, latest: Checkpoint) -> None:
    """The ledger of a run that has trained on samples. A new one would balance, and know nothing of them."""
    try:
        with Ledger(paths.ledger, read_only=True) as ledger:
            dispatched = ledger.balance()["dispatched"]
    except LedgerUnusable:
        raise
    except LedgerError:
        dispatched = 0
    if not dispatched and latest.step > settings.policy.sft_steps:
        raise NotFound(f"{paths.ledger} is missing or empty, and the run is at step {latest.step}: put it back, or "
                       "start a new run", setting="run.run_dir")
