"""Progress is read from the files of a run while they are written."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cosmos_actor.cli.progress import Follower, Progress, panel, plain_line, sparkline
from cosmos_actor.cli.run_view import RunView
from tests.cli.sample_run import append_line, event_lines, metrics_lines


def write(path: Path, records: list[dict[str, object]]) -> None:
    for record in records:
        append_line(path, record)


def test_a_follower_reads_what_is_new_and_leaves_a_line_that_is_being_written(tmp_path: Path) -> None:
    follower, metrics = Follower(tmp_path), tmp_path / "metrics.jsonl"
    assert follower.follow() == ([], [])
    write(metrics, metrics_lines()[:2])
    with metrics.open("a") as file:
        file.write('{"step": 3, "loss/to')
    assert [record["step"] for record in follower.follow()[0]] == [1, 2]
    assert follower.follow()[0] == []
    with metrics.open("a") as file:
        file.write('tal": 1.0}\n')
    assert [record["step"] for record in follower.follow()[0]] == [3]


def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    follower, metrics = Follower(tmp_path), tmp_path / "metrics.jsonl"
    write(metrics, metrics_lines()[:5])
    follower.follow()
    whole = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(whole[:2]) + '{"step": 3, "phase": "sft", "loss/total": 0.5' + " " * 600 + "}\n")
    follower.follow()
    follower.follow()
    assert [record["step"] for record in follower.view.steps] == [1, 2, 3]


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress(tmp_path, title="x", last_step=120, stream=stream) as progress:
        write(tmp_path / "metrics.jsonl", metrics_lines())
        write(tmp_path / "events.jsonl", event_lines())
        progress.notice("waiting for 2 rollout actors")
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if line.startswith("step ")]) == 124
    assert "waiting for 2 rollout actors" in lines
    assert "rollout-0: killed by SIGKILL; starting it again" in lines
    assert any(line.startswith("step 45/120 evaluation: accuracy 0.550 on held-out problems") for line in lines)


def test_a_step_in_one_line() -> None:
    view = RunView()
    view.add_events(event_lines())
    record = {"step": 7, "phase": "grpo", "reward/mean": 0.5, "loss/total": 0.01, "tokens/s": 1234.0, "version": 7,
              "staleness/max": 1, "time/step": 2.0}
    view.add_metrics([record])
    assert plain_line(record, view, 10) == (
        "step 7/10 grpo · reward 0.500 · loss 0.010 · tokens/s 1234 · staleness 1 · weights 7 · actors 7 · "
        "restarts 1 · left 0:06")


@pytest.mark.parametrize(("found", "line"), [
    ({"eval/accuracy": 0.5, "eval/problems": 200}, "accuracy 0.500 on held-out problems"),
    ({"eval/episodes": 4.0, "eval/errors": 0.0, "eval/return": 39.25, "eval/length": 39.25}, "return 39.2 · trials 4"),
    ({"eval/episodes": 7.0, "eval/errors": 1.0, "eval/return": 0.5, "eval/accuracy": 0.25},
     "return 0.5 · success 0.250 · trials 7 · errors 1"),
    ({"eval/episodes": 0.0, "eval/errors": 8.0}, "trials 0 · errors 8"),
])
def test_an_evaluation_in_one_line(found: dict[str, float], line: str) -> None:
    assert plain_line({"step": 7, "phase": "eval", **found}, RunView(), 10) == "step 7/10 evaluation: " + line


def test_a_step_that_took_turns_on_a_gpu_says_how_much_of_it_each_side_had() -> None:
    view = RunView()
    plain = [line for line in metrics_lines() if "loss/total" in line][-1]
    record = {**plain, "memory/policy_peak_bytes": 45_060_000_000, "memory/rollout_peak_bytes": 2e9}
    view.add_metrics([record])
    assert "GPU policy 45.1 GB, rollout 2.0 GB" in plain_line(record, view, 120)
    console = Console(file=io.StringIO(), width=200)
    console.print(panel(view, "x", 120))
    assert "policy 45.1 GB, rollout 2.0 GB" in console.file.getvalue()
    assert "GPU" not in plain_line(plain, view, 120)


def test_steps_of_before_a_rewind_are_not_printed_again(tmp_path: Path) -> None:
    metrics, stream = tmp_path / "metrics.jsonl", io.StringIO()
    progress = Progress(tmp_path, title="x", last_step=120, stream=stream)
    write(metrics, metrics_lines()[:6])
    progress._look()
    whole = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(whole[:3]))
    progress._look()
    append_line(metrics, {**metrics_lines()[3], "time": 99.0})
    progress._look()
    printed = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert printed == [f"{step}/120" for step in (1, 2, 3, 4, 5, 6, 4)]


def test_the_live_panel_shows_the_newest_step_the_actors_and_the_time_left() -> None:
    view = RunView()
    stream = io.StringIO()
    console = Console(file=stream, width=160, force_terminal=False)
    console.print(panel(view, "grpo-arithmetic", 120))
    view.add_metrics(metrics_lines()[:100])
    view.add_events(event_lines())
    console.print(panel(view, "grpo-arithmetic", 120))
    text = stream.getvalue()
    for words in ("grpo-arithmetic", "starting", "step 97/120", "left 0:3", "reward", "weights 97", "● rollout-0×2",
                  "● policy-0", "accuracy 0.828"):
        assert words in text


def test_a_live_display_on_a_terminal_ends_cleanly(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", metrics_lines()[:30])
    stream = io.StringIO()
    with Progress(tmp_path, title="x", last_step=120, live=True, stream=stream) as progress:
        progress.notice("hello")
    assert "hello" in stream.getvalue()
    assert progress.view.last["step"] == 30


def test_a_sparkline_goes_from_its_lowest_to_its_highest() -> None:
    assert sparkline([(1, 0.0), (2, 1.0)]) == "▁█"
    assert sparkline([(1, 1.0)]) == ""
    assert len(sparkline([(at, at % 7) for at in range(1000)])) <= 24


def test_a_resumed_run_prints_only_what_is_new_to_it(tmp_path: Path) -> None:
    metrics, events, stream = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl", io.StringIO()
    write(metrics, metrics_lines()[:6])
    write(events, event_lines())
    with Progress(tmp_path, title="x", last_step=120, stream=stream):
        whole = metrics.read_text().splitlines(keepends=True)
        metrics.write_text("".join(whole[:4]))
        write(metrics, [{**line, "time": 99.0 + place} for place, line in enumerate(metrics_lines()[4:7])])
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["5/120", "6/120", "7/120"]
