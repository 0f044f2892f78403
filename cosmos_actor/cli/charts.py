"""Line charts as SVG text, made to be put into a page that defines the colours. Pure, no dependency.

A chart carries its own description for screen readers, labels with units on both axes, and the value of each point as a
hover title. Colours are CSS variables (`--series-1` …), so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 42
HOVER_POINTS = 400
"""Hover targets of one series: more would make the file large and no target easier to hit."""
SMOOTHED_FROM = 30
"""Points from which a curve is drawn twice: pale as measured, strong as a running mean."""
FLAT = 1e-9
"""A curve that moves by less than this, relative to its height or to 1, is drawn as a constant: that is rounding."""
DASHES = ("", "7 4", "2 3", "9 3 2 3")
"""Series differ by more than colour."""


@dataclass(frozen=True)
class Series:
    """A named curve of (x, y) points, x growing."""

    name: str
    points: Sequence[Point]
    smooth: bool = True


@dataclass(frozen=True)
class Band:
    """A shaded stretch of the x axis with a word at its top."""

    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Scale:
    """Maps a data interval linearly to a pixel interval."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, bands: Sequence[Band] = (),
               dots: Series | None = None, y_range: tuple[float | None, float | None] = (None, None),
               whole: bool = False) -> str:
    """One `<svg>` element. `dots` are marks without a line; `y_range` is what the y axis shows at least.

    whole: y counts things, so its axis has whole numbers only.
    """
    drawn = [one for one in series if one.points]
    everything = [point for one in [*drawn, *([dots] if dots else [])] for point in one.points]
    if not everything:
        return ""
    x_ticks, y_ticks = _ticks_of_x(everything), _ticks_of_y(everything, y_range, whole)
    steps = [point[0] for point in everything]
    x = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    x = x if x.high > x.low else Scale(x.low - 1, x.high + 1, x.start, x.end)
    y = Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        *(_band(band, x) for band in bands),
        _grid(x_ticks, y_ticks, x, y), _axis_labels(x_label, y_label),
        *(_curve(one, number, x, y, x_label) for number, one in enumerate(drawn)),
        _dots(dots, x, y, x_label) if dots else "",
    ]
    label = f"{title}. {describe(drawn)}"
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>')


def describe(series: Sequence[Series]) -> str:
    """The curves in words: where each begins and ends, and between which values it moves."""
    lines = []
    for one in series:
        values = [value for _, value in one.points]
        lines.append(f"{one.name}: {short(values[0])} at {short(one.points[0][0])}, {short(values[-1])} at "
                     f"{short(one.points[-1][0])}, between {short(min(values))} and {short(max(values))}.")
    return " ".join(lines)


def nice_ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers (`whole`: integers) at even distances that enclose [low, high]."""
    if high - low <= FLAT * max(abs(low), abs(high), 1.0):
        pad = abs(low) * 0.5 if abs(low) > FLAT else 0.5
        low, high = low - pad, high + pad
    rough = max((high - low) / about, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(power * factor for factor in factors if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """Few characters, enough digits: 12, 0.35, 1.2k, 3.0e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1_000_000:
        return f"{value / 1_000_000:.4g}M"
    if size >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}" if size >= 0.001 else f"{value:.1e}"


def running_mean(points: Sequence[Point]) -> list[Point]:
    """A centred mean over about a fifteenth of the points."""
    reach = max(1, len(points) // 30)
    smooth = []
    for at, (x, _) in enumerate(points):
        window = [value for _, value in points[max(0, at - reach):at + reach + 1]]
        smooth.append((x, sum(window) / len(window)))
    return smooth


def _ticks_of_x(points: Sequence[Point]) -> list[float]:
    low, high = min(point[0] for point in points), max(point[0] for point in points)
    ticks = [tick for tick in nice_ticks(low, high, 6) if low <= tick <= high and tick == int(tick)]
    return ticks or [low]


def _ticks_of_y(points: Sequence[Point], y_range: tuple[float | None, float | None], whole: bool) -> list[float]:
    values = [value for _, value in points]
    low = min(values) if y_range[0] is None else min(y_range[0], *values)
    high = max(values) if y_range[1] is None else max(y_range[1], *values)
    high = low + 1.0 if high == low == y_range[0] else high
    return nice_ticks(low, high, 4, whole=whole)


def _band(band: Band, x: Scale) -> str:
    start, end = x(max(band.start, x.low)), x(min(band.end, x.high))
    if end <= start:
        return ""
    return (f'<rect class="band" x="{start}" y="{TOP}" width="{end - start:.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'
            f'<text class="band-label" x="{start + 5:.1f}" y="{TOP + 12}">{escape(band.label)}</text>')


def _grid(x_ticks: Sequence[float], y_ticks: Sequence[float], x: Scale, y: Scale) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
             f'<text class="tick" x="{LEFT - 7}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{short(tick)}</text>'
             for tick in y_ticks]
    parts += [f'<line class="axis" x1="{x(tick)}" x2="{x(tick)}" y1="{bottom}" y2="{bottom + 4}"/>'
              f'<text class="tick" x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{short(tick)}</text>'
              for tick in x_ticks]
    return "".join(parts) + f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'


def _axis_labels(x_label: str, y_label: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
            f'{escape(x_label)}</text><text class="label" transform="translate(13 {middle}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_label)}</text>')


def _curve(series: Series, number: int, x: Scale, y: Scale, x_label: str) -> str:
    smooth = series.smooth and len(series.points) >= SMOOTHED_FROM
    measured = _line(series.points, "raw" if smooth else "curve", number, x, y)
    mean = _line(running_mean(series.points), "curve", number, x, y) if smooth else ""
    return measured + mean + _hover(series, number, x, y, x_label)


def _line(points: Sequence[Point], kind: str, number: int, x: Scale, y: Scale) -> str:
    dash = DASHES[number % len(DASHES)] if kind == "curve" else ""
    path = " ".join(f"{x(point[0])},{y(point[1])}" for point in points)
    return (f'<polyline class="{kind}" style="stroke:var(--series-{number + 1})"'
            f'{f" stroke-dasharray={dash!r}" if dash else ""} points="{path}"/>')


def _hover(series: Series, number: int, x: Scale, y: Scale, x_label: str) -> str:
    every = -(-len(series.points) // HOVER_POINTS)
    return "".join(
        f'<circle class="hover" style="fill:var(--series-{number + 1})" cx="{x(px)}" cy="{y(py)}" r="4">'
        f"<title>{escape(x_label)} {short(px)} · {escape(series.name)} {short(py)}</title></circle>"
        for px, py in series.points[::every])


def _dots(series: Series, x: Scale, y: Scale, x_label: str) -> str:
    return "".join(
        f'<circle class="dot" cx="{x(px)}" cy="{y(py)}" r="4.5"><title>{escape(x_label)} {short(px)} · '
        f"{escape(series.name)} {short(py)}</title></circle>" for px, py in series.points)


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; cells are HTML already."""
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
