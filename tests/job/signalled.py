"""The packaged recipe's loop, which sends `up` signals at a point of its own: `order(file, run, point, signals)`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.job.job import Job
from cosmos_actor.recipes import grpo

ORDERS = "COSMOS_ACTOR_TEST_SIGNALS"
"""Environment: the file that an order is left in. When it is obeyed, `.sent` beside it has the time."""
UNDER_WAY_S = 0.02
"""After what the point names has begun."""
POINTS = {
    "sft": ("policy", "sft"), "first weights": ("weights", "publish_reference"), "generate": ("rollout", "generate"),
    "judge": ("reward", "score"), "update": ("policy", "update"), "publish": ("weights", "publish"),
    "checkpoint": ("policy", "save"),
}


def order(file: Path, run: Path, point: str, signals: Sequence[str]) -> None:
    """In the next life, once `point` is under way, `up` gets these signals."""
    file.with_suffix(".sent").unlink(missing_ok=True)
    file.write_text(json.dumps({"run": str(run), "point": point, "signals": list(signals)}))


def sent_at(file: Path) -> float:
    """time.monotonic() when the last order was obeyed; that clock is one for all processes. Fails if it was not."""
    return float(file.with_suffix(".sent").read_text())


def run(job: Job) -> None:
    file = Path(os.environ[ORDERS])
    if file.exists():
        wanted = json.loads(file.read_text())
        client, method = POINTS[wanted["point"]]
        _obey_at(getattr(job, client), method, wanted, file)
    grpo.run(job)


def _obey_at(client: Any, method: str, wanted: dict[str, Any], file: Path) -> None:
    asked = getattr(client, method)

    def obeying(*arguments: Any, **options: Any) -> Any:
        if file.exists():
            file.unlink()
            threading.Timer(UNDER_WAY_S, _send, (wanted, file.with_suffix(".sent"))).start()
        return asked(*arguments, **options)

    setattr(client, method, obeying)


def _send(wanted: dict[str, Any], sent: Path) -> None:
    up = RunPaths(wanted["run"]).owner_pid()
    assert up is not None
    sent.write_text(str(time.monotonic()))
    for name in wanted["signals"]:
        os.kill(up, getattr(signal, name))  # two of one kind may come as one, two of two kinds may not
