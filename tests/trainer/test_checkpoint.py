"""A resumed trainer goes on bit for bit; a damaged checkpoint is one line that names the file."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cosmos_actor.actors.errors import RunDirectoryUnusable
from cosmos_actor.trainer.batch import batch_from_examples
from cosmos_actor.trainer.checkpoint import CheckpointError, CheckpointNotWritten, verify
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make import EXAMPLES, make_engine, make_settings, sample_groups

SAVES = """
import sys
from cosmos_actor.trainer.batch import batch_from_examples
from cosmos_actor.trainer.policy import PolicyTrainer
from tests.trainer.make import EXAMPLES, make_settings
trainer = PolicyTrainer(make_settings())
for step in range(3):
    print(trainer.sft_step(batch_from_examples(EXAMPLES))["loss/total"].hex(), flush=True)
trainer.save(sys.argv[1])
print("saved", flush=True)
sys.stdin.read()
"""


def steps(trainer: PolicyTrainer, count: int) -> list[float]:
    """Losses of alternating supervised and policy updates."""
    losses = []
    for number in range(count):
        groups = sample_groups(make_engine(trainer), seed=trainer.updates["policy"])
        losses.append(trainer.grpo_step(groups)["loss/total"])
        losses.append(trainer.sft_step(batch_from_examples(EXAMPLES[number % 2 :]))["loss/total"])
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    trainer = PolicyTrainer(make_settings())
    trainer.sft_step(batch_from_examples(EXAMPLES))
    directory = tmp_path_factory.mktemp("saved") / "policy"
    trainer.save(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "policy"))


@pytest.mark.parametrize("before", [0, 3])
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path, before: int) -> None:
    straight = PolicyTrainer(make_settings(grpo={"mini_batches": 2}))
    steps(straight, before)
    straight.save(tmp_path / "policy")
    expected = steps(straight, 3)

    resumed = PolicyTrainer(make_settings(grpo={"mini_batches": 2}, seed=7))
    steps(resumed, 1)
    resumed.load(tmp_path / "policy")
    assert steps(resumed, 3) == expected
    assert weights_digest(resumed.weights()) == weights_digest(straight.weights())
    assert resumed.updates == straight.updates


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saves, never = PolicyTrainer(make_settings()), PolicyTrainer(make_settings())
    for number in range(3):
        saves.save(tmp_path / str(number))
        assert steps(saves, 1) == steps(never, 1)


def test_the_random_state_is_restored(copy: Path) -> None:
    trainer = PolicyTrainer(make_settings())
    trainer.load(copy)
    first = torch.rand(3)
    trainer.load(copy)
    assert torch.rand(3).tolist() == first.tolist()


def test_a_killed_process_is_continued_by_another_bit_for_bit(tmp_path: Path, popen) -> None:
    command = [sys.executable, "-c", SAVES, str(tmp_path / "policy")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment)
    lines = [killed.stdout.readline().strip() for _ in range(4)]
    killed.send_signal(signal.SIGKILL)
    assert lines.pop() == "saved"
    resumed, straight = PolicyTrainer(make_settings(seed=3)), PolicyTrainer(make_settings())
    resumed.load(tmp_path / "policy")
    losses = [straight.sft_step(batch_from_examples(EXAMPLES))["loss/total"] for _ in range(6)]
    assert lines == [loss.hex() for loss in losses[:3]]
    assert [resumed.sft_step(batch_from_examples(EXAMPLES))["loss/total"] for _ in range(3)] == losses[3:]


def largest_file(directory: Path, part: str) -> Path:
    return max((directory / part).iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("part", ["model", "optim", "trainer"])
@pytest.mark.parametrize("damage", ["truncated", "corrupt", "missing"])
def test_a_damaged_file_is_named_and_nothing_changes(copy: Path, part: str, damage: str) -> None:
    file = largest_file(copy, part)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "truncated":
        file.write_bytes(content[:-5])
    elif damage == "corrupt":
        file.write_bytes(content)
    else:
        file.unlink()
    trainer = PolicyTrainer(make_settings(seed=5))
    before = weights_digest(trainer.weights())
    with pytest.raises(CheckpointError, match=damage) as error:
        trainer.load(copy)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert weights_digest(trainer.weights()) == before


def test_an_unfinished_save_is_no_checkpoint(copy: Path) -> None:
    (copy / "digests.json").unlink()
    with pytest.raises(CheckpointError, match="never finished"):
        verify(copy)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"sha256": []}', '{"sha256": {"model/x": {"bytes": "many"}}}'])
def test_digests_that_are_none_are_named(copy: Path, text: str) -> None:
    (copy / "digests.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"digests\.json can not be read"):
        verify(copy)


def test_the_checkpoint_of_another_model_is_refused(copy: Path) -> None:
    other = make_settings(model="tiny:qwen3?hidden=16&layers=1&heads=2&kv_heads=1&intermediate=32")
    with pytest.raises(CheckpointError, match=r"policy\.model"):
        PolicyTrainer(other).load(copy)


def test_a_checkpoint_has_the_parts_that_the_layout_promises(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model", "optim", "trainer", "digests.json"}
    record = json.loads((saved / "trainer" / "rank_0.json").read_text())
    assert record["updates"] == {"sft": 1, "policy": 0}


def test_verify_needs_no_torch(saved: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from cosmos_actor.trainer.checkpoint import verify; "
        f"verify(Path({str(saved)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_a_checkpoint_that_finds_no_room_is_one_line_that_names_a_file(tmp_path):
    """torch wraps what the file system says into an error that is none of Exception: nobody would have answered."""
    trainer = PolicyTrainer(make_settings())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(RunDirectoryUnusable, match=r"can not be written: File too large.*run\.run_dir"):
            trainer.save(tmp_path / "policy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(CheckpointError, match="never finished"):
        verify(tmp_path / "policy")


def test_another_failure_of_the_writer_is_an_ordinary_exception(tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    def fail(*arguments, **options):
        raise CheckpointException("write", {0: (ValueError("a bug"), None)})

    monkeypatch.setattr(dcp, "save", fail)
    with pytest.raises(CheckpointNotWritten, match="policy can not be written"):
        PolicyTrainer(make_settings()).save(tmp_path / "policy")


@pytest.mark.parametrize("moment", ["write_data", "read_data"])
def test_an_interrupt_in_the_middle_stays_one(tmp_path, monkeypatch, moment) -> None:
    """torch takes whatever is raised there for a failure of the checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    trainer = PolicyTrainer(make_settings())
    trainer.save(tmp_path / "whole")
    monkeypatch.setattr(FileSystemWriter if moment == "write_data" else FileSystemReader, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.save(tmp_path / "policy") if moment == "write_data" else trainer.load(tmp_path / "whole")
