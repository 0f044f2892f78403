"""The tracker names a complete checkpoint, whenever the writer ends."""

from __future__ import annotations

import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.job.checkpoints import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(RunPaths(tmp_path), keep_last=2)
    made.root.mkdir()
    return made


def write(checkpoints: Checkpoints, step: int, buffered=(("g1/0", 0),)) -> None:
    with checkpoints.writing(step) as draft:
        (draft.directory / "policy").mkdir()
        draft.finish(seed=1, step=step, dispatched_through=step + 1, buffered=list(buffered))


def test_there_is_no_latest_before_the_first(checkpoints):
    assert checkpoints.latest() is None


def test_the_latest_brings_back_what_was_written(checkpoints):
    write(checkpoints, 5)
    write(checkpoints, 10)
    latest = checkpoints.latest()
    assert (latest.step, latest.dispatched_through, latest.buffered) == (10, 11, (("g1/0", 0),))
    assert latest.directory.name == "iter_000000010" and (latest.directory / "policy").is_dir()


def test_a_writer_that_fails_leaves_the_latest_and_no_rubbish(checkpoints):
    write(checkpoints, 5)
    with pytest.raises(RuntimeError), checkpoints.writing(6) as draft:
        (draft.directory / "half").touch()
        raise RuntimeError("killed")
    assert checkpoints.latest().step == 5
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["iter_000000005"]


def test_only_the_newest_are_kept(checkpoints):
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert sorted(path.name for path in checkpoints.root.glob("iter_*")) == ["iter_000000002", "iter_000000003"]


def test_a_step_may_be_written_again_after_a_rewind(checkpoints):
    write(checkpoints, 5, buffered=[("old/0", 0)])
    write(checkpoints, 5, buffered=[("new/0", 1)])
    assert checkpoints.latest().buffered == (("new/0", 1),)


@pytest.mark.parametrize("record", [
    '{"step":', "{}", "[]", "null", '{"step": "5", "dispatched_through": 6, "buffered": []}',
    '{"step": 6, "dispatched_through": 6, "buffered": []}', '{"step": 5, "dispatched_through": 6, "buffered": [7]}'])
def test_a_damaged_checkpoint_is_one_line_that_names_the_file(checkpoints, record):
    write(checkpoints, 5)
    (checkpoints.latest().directory / "job.json").write_text(record)
    with pytest.raises(UserError, match=r"iter_000000005 can not be read.*latest_checkpoint\.txt"):
        checkpoints.latest()


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"../../..", b"iter_7", b"/etc", b"x" * 10_000])
def test_a_tracker_that_names_none_says_which_there_are(checkpoints, text):
    write(checkpoints, 5)
    checkpoints._tracker.write_bytes(text)
    with pytest.raises(UserError, match=r"there are: iter_000000005") as error:
        checkpoints.latest()
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_a_damaged_epoch_is_not_guessed(checkpoints):
    checkpoints.next_epoch()
    (checkpoints.root / "epoch.txt").write_text("x")
    with pytest.raises(UserError, match="epoch.txt is damaged"):
        checkpoints.next_epoch()


def test_epochs_never_repeat(checkpoints):
    assert [checkpoints.next_epoch() for _ in range(3)] == [0, 1, 2]


def test_the_latest_is_kept_also_beside_one_that_was_never_named(tmp_path):
    """Killed between writing step 20 and naming it, the job went on from 10 and came to 12."""
    checkpoints = Checkpoints(RunPaths(tmp_path), keep_last=1)
    write(checkpoints, 10)
    (checkpoints.root / "iter_000000020").mkdir()
    write(checkpoints, 12)
    assert checkpoints.latest().step == 12
    assert [path.name for path in checkpoints.root.glob("iter_*")] == ["iter_000000012"]


def test_a_lost_tracker_is_the_newest_checkpoint_and_not_the_beginning(checkpoints):
    write(checkpoints, 5)
    write(checkpoints, 10)
    checkpoints._tracker.unlink()
    assert checkpoints.latest().step == 10


def test_a_lost_epoch_does_not_begin_anew(checkpoints):
    checkpoints.next_epoch()
    write(checkpoints, 5)
    (checkpoints.root / "epoch.txt").unlink()
    with pytest.raises(UserError, match=r"epoch\.txt is damaged.*No such file"):
        checkpoints.next_epoch()


def test_damage_is_not_quoted_at_length(checkpoints):
    write(checkpoints, 5)
    (checkpoints.latest().directory / "job.json").write_bytes(b"\xff" * 100_000)
    with pytest.raises(UserError) as caught:
        checkpoints.latest()
    assert len(str(caught.value)) < 600
