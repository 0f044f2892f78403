"""What a run's episodes of simulators say, task by task: for report.html. Pure.

Legend: n episodes, k successes among them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cosmos_actor.cli.charts import short, table_of
from cosmos_actor.simulator_bridge.contract import SUCCESS, UNKNOWN

Z_95 = 1.959964
"""Two-sided 95 % of the normal distribution."""
LAST_SHARE = 0.1
"""Of a task's episodes that "at the end" means."""


def wilson(k: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The interval of Wilson (1927) for a success rate: (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = k/n.

    (0, 1) when nothing was tried.
    """
    if n == 0:
        return 0.0, 1.0
    p = k / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def episodes_section(episodes: Sequence[Mapping[str, Any]], failures: Sequence[Mapping[str, Any]]) -> str:
    """HTML: a row a task, and what went wrong with simulators, which is no word about the policy."""
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for episode in episodes:
        if episode.get("outcome", "done") != "done":
            continue
        tasks.setdefault(_name(episode), []).append(episode)
    rows = [_row(task, ended) for task, ended in sorted(tasks.items())]
    head = ("task", "episodes", "return, at the end", "success, at the end (95 %)", "length, at the end",
            "longest", "tries again")
    kinds = Counter(str(failure.get("kind", "")) for failure in failures)
    errors = ", ".join(f"{count} × {escape(kind)}" for kind, count in sorted(kinds.items()))
    told = f"Errors of simulators, none of which is a result: {errors}." if errors else "No simulator failed."
    return (f"{table_of(head, rows)}<p>{told} “At the end” is the last tenth of a task's episodes, and all of an "
            "evaluation's.</p>")


def _name(episode: Mapping[str, Any]) -> str:
    """Episodes of an evaluation are a row of their own, step by step."""
    evaluated = episode.get("phase") == "eval"
    return f"{episode['task']}, evaluated after step {episode['step']}" if evaluated else str(episode["task"])


def _row(task: str, ended: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    evaluated = ended[-1].get("phase") == "eval"
    last = ended if evaluated else ended[-max(1, round(LAST_SHARE * len(ended))):]
    lengths = [float(episode["length"]) for episode in ended]
    return (escape(task), f"{len(ended):,}", short(statistics.mean(float(episode["return"]) for episode in last)),
            success_of(last), short(statistics.mean(lengths[-len(last):])), short(max(lengths)),
            str(sum(int(episode["attempt"]) > 0 for episode in ended)))


def success_of(episodes: Sequence[Mapping[str, Any]]) -> str:
    """k/n, the share, and its interval; a dash where nobody knows of success."""
    judged = [int(episode["success"]) for episode in episodes if int(episode["success"]) != UNKNOWN]
    if not judged:
        return "–"
    k = sum(verdict == SUCCESS for verdict in judged)
    low, high = wilson(k, len(judged))
    return f"{k}/{len(judged)} = {100 * k / len(judged):.0f} % ({100 * low:.0f}–{100 * high:.0f} %)"
