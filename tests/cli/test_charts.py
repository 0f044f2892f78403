"""Charts are well-formed, carry their meaning in words, and stay inside their frame."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.cli.charts import (
    HEIGHT,
    HOVER_POINTS,
    WIDTH,
    Band,
    Series,
    line_chart,
    nice_ticks,
    running_mean,
    short,
)

FINITE = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(FINITE, min_size=1, max_size=80), st.booleans())
def test_every_curve_is_well_formed_and_inside_the_frame(values: list[float], whole: bool) -> None:
    points = [(float(at), value) for at, value in enumerate(values, 1)]
    drawing = line_chart("A <title>", [Series("a & b", points)], x_label="step", y_label="nats", whole=whole)
    root = ElementTree.fromstring(drawing)
    for circle in root.iter("circle"):
        assert -1 <= float(circle.get("cx", "")) <= WIDTH + 1
        assert -1 <= float(circle.get("cy", "")) <= HEIGHT + 1


@given(FINITE, FINITE)
def test_ticks_enclose_the_values_at_even_distances(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9
    gaps = [after - before for before, after in zip(ticks, ticks[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1e-6 * max(gaps) + slack


def test_a_chart_says_what_it_shows_to_who_can_not_see_it() -> None:
    drawing = line_chart("Reward", [Series("mean", [(1, 0.25), (10, 0.75)])], x_label="step", y_label="mean reward")
    assert 'role="img"' in drawing
    assert 'aria-label="Reward. mean: 0.25 at 1, 0.75 at 10, between 0.25 and 0.75."' in drawing
    assert "<title>step 10 · mean 0.75</title>" in drawing
    assert ">step</text>" in drawing and ">mean reward</text>" in drawing


def test_series_differ_by_more_than_colour() -> None:
    points = [(1.0, 1.0), (2.0, 2.0)]
    drawing = line_chart("T", [Series("a", points), Series("b", points)], x_label="x", y_label="y")
    assert drawing.count("stroke-dasharray") == 1


def test_a_count_has_whole_numbers_on_its_axis() -> None:
    drawing = line_chart("Staleness", [Series("max", [(1, 0), (2, 1)])], x_label="step", y_label="versions", whole=True,
                         y_range=(0.0, 1.0))
    assert re.findall(r'text-anchor="end">([^<]*)<', drawing) == ["0", "1"]


def test_a_long_curve_has_a_bounded_number_of_hover_targets() -> None:
    points = [(float(at), float(at)) for at in range(10_000)]
    assert line_chart("T", [Series("a", points)], x_label="x", y_label="y").count("<title>") <= HOVER_POINTS


def test_no_points_no_chart() -> None:
    assert line_chart("T", [Series("a", [])], x_label="x", y_label="y") == ""


def test_a_band_is_shown_with_its_word() -> None:
    points = [(float(at), 1.0) for at in range(1, 10)]
    drawing = line_chart("T", [Series("a", points)], x_label="x", y_label="y", bands=[Band(1, 4, "SFT")])
    assert ">SFT</text>" in drawing


def test_a_running_mean_keeps_a_constant() -> None:
    assert running_mean([(float(at), 3.0) for at in range(100)]) == [(float(at), 3.0) for at in range(100)]


def test_short_numbers() -> None:
    values = (0, 12, 0.35, 12_345, 2_500_000, 3e-5)
    assert [short(value) for value in values] == ["0", "12", "0.35", "12.35k", "2.5M", "3.0e-05"]
