"""`report.html`: one self-contained page about a run, made from its directory, whatever became of it.

No script, no font, no address outside the run's directory: only videos are files beside it. Missing or half-written
inputs leave their section out and say why.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.run_directory import RunPaths, write_whole
from cosmos_actor.cli.charts import Band, Series, line_chart, short, table_of
from cosmos_actor.cli.episodes import episodes_section
from cosmos_actor.cli.evaluations import evaluations_section, player
from cosmos_actor.cli.run_view import RunView, duration, number

SFT, UPDATE = "sft", "update"
"""Phases of a run: supervised steps, and those that learn from rewards."""
ENDS = 5
"""Steps averaged for "at the start" and "at the end": one step alone is mostly noise."""


@dataclass(frozen=True)
class ReportInput:
    """All that a report says. `ok` is None while the run is not over."""

    name: str
    view: RunView
    outcome: str = ""
    ok: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    balance: Mapping[str, Any] | None = None
    episodes: Sequence[Mapping[str, Any]] = ()
    failures: Sequence[Mapping[str, Any]] = ()
    """Errors of simulators, as events.jsonl has them."""


def write_report(run_directory: Path, *, outcome: str = "", ok: bool | None = None) -> Path:
    """Read the run directory and write its `report.html`, whole. Returns the path."""
    paths = RunPaths(run_directory)
    view = RunView()
    view.add_metrics(read_json_lines(paths.metrics, skip_damaged=True))
    events = read_json_lines(paths.events, skip_damaged=True)
    view.add_events(events)
    settings, digest = _settings(run_directory)
    write_whole(paths.report, report_page(ReportInput(
        name=str(settings.get("run.name") or paths.root.name), view=view, outcome=outcome, ok=ok,
        settings=settings, digest=digest, balance=read_balance(paths),
        episodes=[_with_its_video(episode, paths) for episode in read_json_lines(paths.episodes, skip_damaged=True)],
        failures=[event for event in events if event["event"] == "simulator_failed"])))
    return paths.report


def _with_its_video(episode: Mapping[str, Any], paths: RunPaths) -> Mapping[str, Any]:
    """Without the name of one that is kept no longer."""
    if "video" not in episode or (paths.root / str(episode["video"])).is_file():
        return episode
    return {name: value for name, value in episode.items() if name != "video"}


def read_balance(paths: RunPaths) -> dict[str, Any] | None:
    """The ledger's balance, or None when there is no ledger yet."""
    from cosmos_actor.actors.ledger import Ledger, LedgerError
    try:
        with Ledger(paths.ledger, read_only=True) as ledger:
            return ledger.balance()
    except LedgerError:
        return None


def _settings(run_directory: Path) -> tuple[Mapping[str, Any], str]:
    from cosmos_actor.actors.errors import UserError
    from cosmos_actor.recipes.resolved import load_resolved
    from cosmos_actor.recipes.settings import digest, values
    try:
        settings = load_resolved(RunPaths(run_directory).configuration)
    except UserError:
        return {}, ""
    return values(settings), digest(settings)


def report_page(given: ReportInput) -> str:
    """The whole page as text."""
    style = (resources.files("cosmos_actor.cli") / "report.css").read_text(encoding="utf-8")
    sections = (
        _section("Outcome", _outcome(given)),
        *(_section(title, body) for title, body in (
            ("Evaluations", evaluations_section(given.episodes)), ("Videos of evaluations", player(given.episodes)))
          if body),
        _section("Curves", _curves(given.view)),
        *((_section("Episodes", episodes_section(given.episodes, given.failures)),) if given.episodes else ()),
        _section("Where the time went", _waiting(given.view)), _section("Actors", _actors(given.view)),
        _section("Ledger", _ledger(given.balance)), _section("Settings", _settings_tables(given)),
    )
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(given.name)}: report</title><style>{style}</style></head><body><main>"
            f"<header><h1>{escape(given.name)}</h1>{_badge(given)}</header>{''.join(sections)}</main></body></html>\n")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _badge(given: ReportInput) -> str:
    kind, text = {True: ("good", "finished"), False: ("bad", "failed"), None: ("open", "not over")}[given.ok]
    return f'<span class="badge {kind}">{text}</span>'


# ---- outcome

def _outcome(given: ReportInput) -> str:
    tiles = "".join(f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>'
                    for label, value in headline(given.view, given.balance))
    reason = f"<p>{escape(given.outcome)}</p>" if given.outcome else ""
    return f'{reason}<dl class="tiles">{tiles}</dl>'


def headline(view: RunView, balance: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(label, value) of the figures that a reader wants first."""
    tokens = sum(number(record, "tokens") or 0.0 for record in view.steps)
    rates = [value for _, value in view.series("tokens/s")]
    facts = [
        ("steps", short(view.last["step"]) if view.steps else "none"),
        ("mean reward, start → end", _from_to(view.series("reward/mean"))),
        ("held-out accuracy, first → last", _from_to(view.evaluations, ends=1)),
        ("time", duration(number(view.last, "time")) if view.steps else ""),
        ("tokens trained on", short(tokens) if tokens else ""),
        ("tokens/s, median", short(statistics.median(rates)) if rates else ""),
        ("restarts", str(view.restarts) if view.actors else ""),
        ("ledger", "" if balance is None else "balances" if balance["balanced"] else "does NOT balance"),
    ]
    return [(label, value) for label, value in facts if value]


def _from_to(points: Sequence[tuple[float, float]], ends: int = ENDS) -> str:
    values = [value for _, value in points]
    if not values:
        return ""
    return f"{statistics.mean(values[:ends]):.2f} → {statistics.mean(values[-ends:]):.2f}"


# ---- curves

@dataclass(frozen=True)
class Chart:
    """One chart: which metrics it draws, and what its axes mean."""

    title: str
    y_label: str
    metrics: tuple[tuple[str, str], ...]
    phase: str = UPDATE
    """Which steps: SFT, UPDATE, or all when empty."""
    y_range: tuple[float | None, float | None] = (None, None)
    counts: bool = False


CHARTS = (
    Chart("Return", "mean of the episodes that ended", (("episode/return", "return"),)),
    Chart("Success", "share of the episodes that ended", (("episode/success", "success"),), y_range=(0.0, 1.0)),
    Chart("Length of an episode", "steps", (("episode/length", "length"),), y_range=(0.0, None)),
    Chart("Reward", "mean reward per sample", (("reward/mean", "mean"),), y_range=(0.0, 1.0)),
    Chart("Loss of the policy", "loss per token", (("loss/total", "total"), ("loss/policy", "policy term"))),
    Chart("Loss of the value", "squared error", (("loss/value", "value"),), y_range=(0.0, None)),
    Chart("Explained variance", "of the returns, by the value", (("explained_variance", "share"),)),
    Chart("Loss of the SFT phase", "cross-entropy, nats per token", (("loss/total", "loss"),), phase=SFT,
          y_range=(0.0, None)),
    Chart("KL to the reference", "nats per token", (("kl/reference", "KL"),), y_range=(0.0, None)),
    Chart("Engine against trainer", "k3, nats per token", (("mismatch/k3", "k3"),), y_range=(0.0, None)),
    Chart("Entropy", "nats per token", (("entropy", "entropy"),), y_range=(0.0, None)),
    Chart("KL to the policy that acted", "nats per step", (("kl/old", "KL"),), y_range=(0.0, None)),
    Chart("Staleness", "weight versions", (("staleness/max", "max"),), y_range=(0.0, 1.0), counts=True),
    Chart("Throughput", "tokens per second", (("tokens/s", "tokens/s"),), y_range=(0.0, None)),
    Chart("Time of a step", "seconds", (("time/step", "whole step"), ("wait/rollout", "rollout waits"),
                                        ("wait/policy", "policy waits")), phase="", y_range=(0.0, None)),
    Chart("Memory of the GPU, at its peak", "bytes", (
        ("memory/policy_peak_bytes", "policy"), ("memory/rollout_peak_bytes", "rollout"),
        ("memory/policy_used_bytes", "of all, policy's turn"), ("memory/rollout_used_bytes", "of all, rollout's turn")),
        y_range=(0.0, None)),
    Chart("Sampled tokens", "tokens per step", (("tokens", "tokens"),), y_range=(0.0, None)),
    Chart("Gradient norm", "before clipping", (("grad_norm", "norm"),), phase="", y_range=(0.0, None)),
    Chart("Clipped tokens", "share of tokens", (("clip/fraction", "share"),), y_range=(0.0, None)),
)


def _curves(view: RunView) -> str:
    figures = [figure for chart in CHARTS if (figure := _figure(chart, view))]
    if not figures:
        return "<p>No step was finished, so there is no curve.</p>"
    return f'<div class="charts">{"".join(figures)}</div>'


def _figure(chart: Chart, view: RunView) -> str:
    series = [Series(name, _of_phase(view, metric, chart.phase), smooth=not chart.counts)
              for metric, name in chart.metrics]
    dots = Series("held-out accuracy", view.evaluations) if chart.title == "Reward" and view.evaluations else None
    drawing = line_chart(chart.title, series, x_label="step", y_label=chart.y_label, y_range=chart.y_range, dots=dots,
                         whole=chart.counts, bands=_bands(view) if not chart.phase else ())
    if not drawing:
        return ""
    return f"<figure><figcaption>{escape(chart.title)}{_legend(series, dots)}</figcaption>{drawing}</figure>"


def _of_phase(view: RunView, metric: str, phase: str) -> list[tuple[float, float]]:
    steps = {record["step"] for record in view.steps if not phase or (record.get("phase") == SFT) is (phase == SFT)}
    return [point for point in view.series(metric) if point[0] in steps]


def _bands(view: RunView) -> list[Band]:
    sft = [int(record["step"]) for record in view.steps if record.get("phase") == SFT]
    return [Band(sft[0], sft[-1] + 1, "SFT")] if sft else []


def _legend(series: Sequence[Series], dots: Series | None) -> str:
    drawn = [one for one in series if one.points]
    if len(drawn) < 2 and dots is None:
        return ""
    keys = [f'<span><svg class="key" viewBox="0 0 24 8" aria-hidden="true"><line x1="0" x2="24" y1="4" y2="4" '
            f'class="key-{at + 1}"/></svg>{escape(one.name)}</span>' for at, one in enumerate(drawn)]
    if dots is not None:
        keys.append('<span><svg class="key" viewBox="0 0 24 8" aria-hidden="true">'
                    f'<circle class="dot" cx="12" cy="4" r="3.5"/></svg>{escape(dots.name)}</span>')
    return f'<span class="legend">{"".join(keys)}</span>'


# ---- tables

def _waiting(view: RunView) -> str:
    total = sum(seconds for _, seconds in view.seconds_per_step())
    timed = {name for record in view.steps for name in record if name.startswith(("wait/", "time/"))}
    names = sorted(timed - {"time/step"})
    if not total or not names:
        return "<p>No step was timed.</p>"
    rows = []
    for name in names:
        seconds = sum(value for _, value in view.series(name))
        kind, _, what = name.partition("/")
        label = f"{what} had nothing to do" if kind == "wait" else what.replace("_", " ")
        rows.append((label, duration(seconds), _bar(seconds / total)))
    return ("<p>Seconds summed over all steps, and their share of the steps' wall time. What several actors do side "
            f"by side is summed over them.</p>{table_of(('', 'time', 'share of wall time'), rows)}")


def _bar(share: float) -> str:
    width = min(100.0, 100.0 * share)
    return f'<span class="bar"><i style="width:{width:.1f}%"></i></span>{100 * share:.0f} %'


def _actors(view: RunView) -> str:
    if not view.actors:
        return "<p>The supervisor wrote no event: the roles ran in one process, or none was started.</p>"
    rows = [(escape(actor.actor), escape(actor.state), str(actor.restarts),
             "<br>".join(escape(reason) for reason in actor.reasons) or "–",
             str(actor.pid or "–"), f"<code>{escape(actor.interpreter or '–')}</code>")
            for actor in view.actors.values()]
    return table_of(("actor", "state", "restarts", "why each life ended", "pid", "interpreter"), rows)


def _ledger(balance: Mapping[str, Any] | None) -> str:
    if balance is None:
        return "<p>There is no ledger: nothing was dispatched.</p>"
    rows = [("trained", balance["trained"]), ("buffered", balance["buffered"]), ("in flight", balance["in_flight"]),
            *((f"dropped: {reason}", count) for reason, count in balance["dropped"].items())]
    dispatched = balance["dispatched"]
    verdict = ("Every trajectory that was dispatched is accounted for." if balance["balanced"] else
               "The rows below do not add up to what was dispatched.")
    cells = [(escape(label), f"{count:,}", _bar(count / dispatched) if dispatched else "") for label, count in rows]
    total = ("<b>dispatched</b>", f"<b>{dispatched:,}</b>", "")
    return f"<p>{verdict}</p>{table_of(('state', 'trajectories', 'share'), [*cells, total])}"


def _settings_tables(given: ReportInput) -> str:
    if not given.settings:
        return "<p>The settings could not be read.</p>"
    sections: dict[str, list[tuple[str, str]]] = {}
    for path, value in given.settings.items():
        section, _, name = path.partition(".")
        row = (f"<code>{escape(name)}</code>", f"<code>{escape(_plain(value))}</code>")
        sections.setdefault(section, []).append(row)
    tables = "".join(f"<div><h3>{escape(name)}</h3>{table_of((), rows)}</div>" for name, rows in sections.items())
    return (f"<p>Digest <code>{given.digest[:16]}</code> (of what decides the numbers). The file "
            "<code>config.resolved.toml</code> reloads to the same settings.</p>"
            "<details><summary>All settings</summary>"
            f'<div class="settings">{tables}</div></details>')


def _plain(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
