"""What of a run is not whole is said before anything starts, and what is gone for good is said as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.json_lines import JsonLinesWriter
from cosmos_actor.actors.ledger import Ledger
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.cli.resume import resumable
from cosmos_actor.job.checkpoints import Checkpoints
from cosmos_actor.recipes.resolve import resolve

SETTINGS = resolve("grpo-arithmetic", ["policy.sft_steps=2"])


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run with a checkpoint of step 4 and a line for each of its five steps."""
    paths = RunPaths(tmp_path)
    paths.checkpoints.mkdir()
    with Checkpoints(paths, keep_last=1).writing(4) as draft:
        draft.finish(seed=0, step=4, dispatched_through=4, buffered=[])
    with Ledger(paths.ledger) as ledger:
        ledger.dispatched([("g1/0", 0)], 3, 2)
    writer = JsonLinesWriter(paths.metrics)
    for step in range(1, 6):
        writer.append({"step": step})
    writer.close()
    return paths


def test_a_whole_run_has_nothing_to_be_told(paths: RunPaths) -> None:
    assert resumable(SETTINGS, paths) == []


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    assert resumable(SETTINGS, RunPaths(tmp_path)) == []


def test_steps_that_are_gone_from_the_metrics_are_told(paths: RunPaths) -> None:
    paths.metrics.write_text('{"step": 1}\n{"step": 4}\n')
    [line] = resumable(SETTINGS, paths)
    assert "metrics.jsonl has no line of 2 steps between 2 and 3" in line
    paths.metrics.unlink()
    assert "no line of 4 steps between 1 and 4" in resumable(SETTINGS, paths)[0]


@pytest.mark.parametrize("damage", [b"", None, b"\x00" * 4096, b"x" * 10_000])
def test_a_lost_ledger_is_not_replaced_by_an_empty_one(paths: RunPaths, damage: bytes | None) -> None:
    paths.ledger.unlink() if damage is None else paths.ledger.write_bytes(damage)
    with pytest.raises(UserError, match=r"ledger\.sqlite .*start a new run"):
        resumable(SETTINGS, paths)


def test_before_the_first_sample_there_need_not_be_a_ledger(paths: RunPaths) -> None:
    paths.ledger.unlink()
    assert resumable(resolve("grpo-arithmetic", ["policy.sft_steps=4"]), paths) == []


def test_damage_names_the_file(paths: RunPaths) -> None:
    paths.metrics.write_text("garbage\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged: line 1"):
        resumable(SETTINGS, paths)
    paths.latest_checkpoint.write_text("")
    with pytest.raises(UserError, match=r"latest_checkpoint\.txt names no checkpoint"):
        resumable(SETTINGS, paths)
