"""What a run's evaluations say: success step by step, trials task by task, and their videos. For report.html. Pure.

The player needs no script: an episode is a `<details>` of which one at a time is open, and its video is loaded when
somebody plays it. Paths are relative, so a run's folder can be copied.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from cosmos_actor.cli.charts import Series, line_chart, short, table_of
from cosmos_actor.cli.episodes import success_of, wilson
from cosmos_actor.simulator_bridge.contract import FAILURE, SUCCESS, UNKNOWN

Episode = Mapping[str, Any]

DONE = "done"
BINS = 16
"""Bars of a histogram of lengths."""
BAR, HEIGHT = 7, 26
"""Pixels of one, with its gap, and of the highest."""
MOST_CURVES = 4
"""Of one chart: as many colours as there are."""
MOST_FILMS = 300
"""Episodes in the player, newest evaluation first: a page of thousands opens slowly."""
MARKS = {SUCCESS: ("●", "good", "success"), FAILURE: ("○", "bad", "failure"), UNKNOWN: ("·", "", "ended")}
ERROR = ("×", "open", "error of a simulator")


def evaluations_section(episodes: Sequence[Episode]) -> str:
    """HTML; empty where nothing was evaluated."""
    evaluated = [episode for episode in episodes if episode.get("phase") == "eval"]
    if not evaluated:
        return ""
    last = max(int(episode["step"]) for episode in evaluated)
    newest = [episode for episode in evaluated if episode["step"] == last]
    return (f"{_success_by_step(evaluated)}<p>The evaluation after step {last}, trial by trial: ● success, ○ failure, "
            "× an error of a simulator, which is no result, · ended where nobody knows of success.</p>"
            f"{_by_task(newest)}")


def player(episodes: Sequence[Episode]) -> str:
    """HTML: the filmed episodes; empty where none was."""
    filmed = sorted((episode for episode in episodes if episode.get("video")),
                    key=lambda episode: -int(episode["step"]))  # stable: tasks and trials keep their order
    if not filmed:
        return ""
    shown = filmed[:MOST_FILMS]
    more = f"<p>The newest {len(shown)} of {len(filmed)}; all are in <code>videos/</code>.</p>" * (shown != filmed)
    return f'{more}<div class="films">{"".join(_film(episode, at == 0) for at, episode in enumerate(shown))}</div>'


# ---- figures

def _success_by_step(evaluated: Sequence[Episode]) -> str:
    steps = sorted({int(episode["step"]) for episode in evaluated})
    tasks = sorted({str(episode["task"]) for episode in evaluated})
    if len(steps) < 2:
        return ""
    curves = [Series("all tasks", _shares(evaluated, steps), smooth=False)]
    if 1 < len(tasks) < MOST_CURVES:
        curves += [Series(task, _shares([one for one in evaluated if one["task"] == task], steps), smooth=False)
                   for task in tasks]
    drawing = line_chart("Success of evaluations", curves, x_label="step", y_label="share of the trials",
                         y_range=(0.0, 1.0))
    if not drawing:
        return ""
    keys = "".join(f'<span><svg class="key" viewBox="0 0 24 8" aria-hidden="true"><line x1="0" x2="24" y1="4" y2="4" '
                   f'class="key-{at + 1}"/></svg>{escape(curve.name)}</span>' for at, curve in enumerate(curves))
    legend = f'<span class="legend">{keys}</span>' if len(curves) > 1 else ""
    return (f'<div class="charts one"><figure><figcaption>Success by step{legend}</figcaption>{drawing}</figure></div>')


def _shares(episodes: Sequence[Episode], steps: Sequence[int]) -> list[tuple[float, float]]:
    points = []
    for step in steps:
        judged = [one for one in episodes if one["step"] == step and _known(one)]
        if judged:
            points.append((float(step), sum(one["success"] == SUCCESS for one in judged) / len(judged)))
    return points


def _known(episode: Episode) -> bool:
    return episode.get("outcome", DONE) == DONE and int(episode["success"]) != UNKNOWN


def _by_task(newest: Sequence[Episode]) -> str:
    rows = []
    longest = max((int(one["length"]) for one in newest), default=1)
    for task in sorted({str(one["task"]) for one in newest}):
        tried = [one for one in newest if one["task"] == task]
        done = [one for one in tried if one.get("outcome", DONE) == DONE]
        lengths = [int(one["length"]) for one in done]
        rows.append((escape(task), success_of(done),
                     f'<span class="trials">{"".join(_mark(one) for one in tried)}</span>',
                     f"{_histogram(lengths, longest)}median {short(statistics.median(lengths))}" if lengths else "–"))
    total = [one for one in newest if _known(one)]
    k = sum(one["success"] == SUCCESS for one in total)
    low, high = wilson(k, len(total))
    told = (f"<p>All tasks: {k} of {len(total)} trials succeeded, {100 * k / len(total):.0f} % "
            f"({100 * low:.0f}–{100 * high:.0f} %).</p>") if total else ""
    return told + table_of(("task", "success (95 %)", "trials", f"lengths, 0 to {longest} steps"), rows)


def _mark(episode: Episode) -> str:
    sign, kind, word = MARKS[int(episode["success"])] if episode.get("outcome", DONE) == DONE else ERROR
    title = f"trial {_trial(episode)}: {word}"
    if episode.get("video"):
        return f'<a class="{kind}" href="#{_anchor(episode)}" title="{title}, filmed">{sign}</a>'
    return f'<span class="{kind}" title="{title}">{sign}</span>'


def _histogram(lengths: Sequence[int], longest: int) -> str:
    counts = [0] * BINS
    for length in lengths:
        counts[min(BINS - 1, length * BINS // max(1, longest))] += 1
    most = max(counts)
    bars = "".join(
        f'<rect x="{at * BAR}" y="{HEIGHT - height}" width="{BAR - 1}" height="{height}"><title>{count} of '
        f"{at * longest // BINS} to {(at + 1) * longest // BINS} steps</title></rect>"
        for at, count in enumerate(counts) if count for height in (max(2, round(HEIGHT * count / most)),))
    return (f'<svg class="lengths" viewBox="0 0 {BAR * BINS} {HEIGHT}" role="img" aria-label="lengths of '
            f'{len(lengths)} episodes, {min(lengths)} to {max(lengths)} steps">{bars}</svg>')


# ---- the player

def _film(episode: Episode, first: bool) -> str:
    sign, kind, word = MARKS[int(episode["success"])]
    facts = [("trial", _trial(episode)), ("instruction", str(episode.get("instruction", ""))),
             ("return", short(float(episode["return"]))), ("length", f"{int(episode['length']):,} steps"),
             ("outcome", word), ("initial state or seed", _beginning(episode)), ("run by", str(episode["actor"])),
             ("file", str(episode["video"]))]
    table = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts if value)
    source = escape(quote(str(episode["video"])))
    return (f'<details name="film" id="{_anchor(episode)}"{" open" if first else ""}><summary><span class="{kind}">'
            f"{sign} {word}</span> <b>{escape(str(episode['task']))}</b>, trial {_trial(episode)}, after step "
            f"{int(episode['step'])}</summary><div class=\"film\"><video controls loop muted playsinline "
            f'preload="{"metadata" if first else "none"}" src="{source}"></video><dl>{table}</dl></div></details>')


def _trial(episode: Episode) -> str:
    return escape(str(episode["unit"]).rpartition("/")[2])


def _beginning(episode: Episode) -> str:
    state = int(episode["initial_state"])
    return f"initial state {state}" if state >= 0 else f"seed {episode['seed']}"


def _anchor(episode: Episode) -> str:
    return "film-" + quote(f"{episode['step']}-{episode['unit']}", safe="")
