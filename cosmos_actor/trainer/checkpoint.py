"""A trainer's whole state on disk, and back bit for bit.

    DIRECTORY/model/…      every weight, torch.distributed.checkpoint format, any number of ranks can read it
    DIRECTORY/optim/…      both moments and the step of AdamW; absent before the first update
    DIRECTORY/trainer/…    counts of updates and each rank's random state, JSON
    DIRECTORY/adapter/…    where an adapter is trained: a directory that peft loads; model/ then has the adapter only
    DIRECTORY/digests.json SHA-256 of each file above, written last: a directory without it is not a checkpoint

The caller writes into a temporary name and renames it. `verify` needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cosmos_actor.actors.disk import refusal
from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.run_directory import ANOTHER_CHECKPOINT

if TYPE_CHECKING:
    import torch

    from cosmos_actor.trainer.world import World

DIGESTS = "digests.json"
FORMAT = 1


class Trainer(Protocol):
    """What a checkpoint needs of a trainer: all of its state is in these."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    updates: dict[str, int]
    model_name: str
    """A checkpoint of another one is refused."""
    model_setting: str
    """The setting that decides `model_name`."""
    base_digest: str
    """Of the frozen base of an adapter, which a checkpoint does not hold; empty without one."""

    def reset_optimizer(self) -> None:
        """Forget the moments."""
        ...


class CheckpointError(UserError):
    """A checkpoint that can not be used; the line names the file and what is wrong with it."""

    def __init__(self, line: str) -> None:
        super().__init__(f"{line}; {ANOTHER_CHECKPOINT}", setting="run.run_dir")


class CheckpointNotWritten(Exception):
    """A checkpoint could not be written, for another reason than the file system's."""


def save_trainer(trainer: Trainer, directory: Path, also: Callable[[Path], None] | None = None) -> None:
    """Write everything. A collective; `directory` may exist and is to be empty. Raises RunDirectoryUnusable.

    `also` writes more below `directory`, which belongs to the checkpoint as all else does.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        _save(trainer, directory, also)
    except (Exception, CheckpointException) as error:  # torch's own is none of Exception
        failures = getattr(error, "failures", None) or {0: (error, None)}  # rank -> (error, its stack)
        refused = next((found for failure, _ in failures.values() if (found := refusal(failure)) is not None), None)
        raise refused or CheckpointNotWritten(f"{directory} can not be written: {error}") from error


def _save(trainer: Trainer, directory: Path, also: Callable[[Path], None] | None) -> None:
    import torch.distributed.checkpoint as dcp

    state = _tensors(trainer, with_optimizer=bool(trainer.optimizer.state))
    (directory / "trainer").mkdir(parents=True, exist_ok=True)
    with _quiet_alone(trainer.world.size) as no_dist:
        for part, tensors in state.items():
            dcp.save(tensors, checkpoint_id=directory / part, no_dist=no_dist)
    record = json.dumps(_record(trainer), indent=1)
    (directory / "trainer" / f"rank_{trainer.world.rank}.json").write_text(record, encoding="utf-8")
    if also is not None:
        also(directory)
    trainer.world.barrier()
    if trainer.world.rank == 0:
        _write_digests(directory)
    trainer.world.barrier()


def load_trainer(trainer: Trainer, directory: Path) -> None:
    """Read everything. A collective. Raises CheckpointError before anything of the trainer has changed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

    verify(directory)
    record = _read_record(directory, trainer.world.rank)
    _check_record(record, trainer, directory)
    if not record["optimizer"]:
        trainer.reset_optimizer()
    state = _tensors(trainer, with_optimizer=record["optimizer"])
    with _quiet_alone(trainer.world.size) as no_dist:
        for part, tensors in state.items():
            dcp.load(tensors, checkpoint_id=directory / part, no_dist=no_dist)
    if record["optimizer"]:
        set_state_dict(
            trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"],
            options=_options(trainer)
        )
    else:
        set_model_state_dict(trainer.model, state["model"], options=_options(trainer))
    trainer.updates = dict(record["updates"])
    _restore_random(record["random"])


def verify(directory: Path) -> None:
    """Raises CheckpointError unless every file is there with the bytes that were written."""
    listing = directory / DIGESTS
    if not listing.is_file():
        raise CheckpointError(f"{listing} is missing: the checkpoint was never finished")
    for name, expected in _listed(listing).items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(f"{file} is truncated: {file.stat().st_size} of {expected['bytes']} bytes")
        if _digest(file) != expected["digest"]:
            raise CheckpointError(f"{file} is corrupt: its bytes are not the ones that were written")


def _listed(listing: Path) -> dict[str, dict[str, Any]]:
    """What `digests.json` says of each file."""
    try:
        listed = _read_json(listing)["sha256"].items()
        return {str(name): {"bytes": int(said["bytes"]), "digest": str(said["digest"])} for name, said in listed}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{listing} can not be read: {error!r}") from error


@contextmanager
def _quiet_alone(size: int) -> Iterator[bool]:
    """Whether to leave torch.distributed out; without the warning that it was left out.

    A Ctrl-C in the middle is one: torch would wrap it as a failure of the checkpoint.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield size == 1
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, KeyboardInterrupt):
                    raise failure from error
            raise


def _tensors(trainer: Trainer, *, with_optimizer: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    if not with_optimizer:
        return {"model": _kept(trainer, get_model_state_dict(trainer.model, options=_options(trainer)))}
    model, optim = get_state_dict(trainer.model, trainer.optimizer, options=_options(trainer))
    return {"model": _kept(trainer, model), "optim": optim}


def _kept(trainer: Trainer, model: dict[str, Any]) -> dict[str, Any]:
    """Without a frozen base. torch leaves a frozen tensor that has two names in under the second."""
    if not trainer.base_digest:
        return model
    trained = {name for name, tensor in trainer.model.named_parameters() if tensor.requires_grad}
    return {name: tensor for name, tensor in model.items() if name in trained}


def _options(trainer: Trainer) -> Any:
    """A frozen base is in no checkpoint. What was asked of a checkpoint and is not in it is an error all the same."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    adapted = bool(trainer.base_digest)
    return StateDictOptions(ignore_frozen_params=adapted, strict=not adapted)


def _record(trainer: Trainer) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model": trainer.model_name,
        "ranks": trainer.world.size,
        "optimizer": bool(trainer.optimizer.state),
        "updates": trainer.updates,
        "base": trainer.base_digest,
        "random": _random(),
    }


def _read_record(directory: Path, rank: int) -> dict[str, Any]:
    """A rank that did not exist when the checkpoint was written takes the first rank's record."""
    file = directory / "trainer" / f"rank_{rank}.json"
    return _read_json(file if file.is_file() else directory / "trainer" / "rank_0.json")


def _check_record(record: dict[str, Any], trainer: Trainer, directory: Path) -> None:
    file = directory / "trainer"
    if record["format"] != FORMAT:
        raise CheckpointError(f"{file} has format {record['format']}, this program reads {FORMAT}")
    if record["model"] != trainer.model_name:
        raise CheckpointError(f"{file} is of {trainer.model_setting} = {record['model']}, not of {trainer.model_name}")
    base = record.get("base", "")
    if bool(base) != bool(trainer.base_digest):
        there, asked = ("an adapter", "a whole model") if base else ("a whole model", "an adapter")
        raise CheckpointError(f"{file} is of {there}, and policy.lora.rank asks for {asked}")
    if base != trainer.base_digest:
        raise CheckpointError(f"{file} is of an adapter for a base with digest {base[:16]}, {trainer.model_setting} = "
                              f"{trainer.model_name} has {trainer.base_digest[:16]} now")


def _write_digests(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != DIGESTS)
    listing = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "digest": _digest(path)}
        for path in files
    }
    (directory / DIGESTS).write_text(json.dumps({"format": FORMAT, "sha256": listing}, indent=1), encoding="utf-8")


def _digest(file: Path) -> str:
    made = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            made.update(chunk)
    return made.hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can not be read: {error}") from error


def _random() -> dict[str, str]:
    import torch

    state = {"cpu": bytes(torch.get_rng_state().numpy()).hex()}
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().numpy()).hex()
    return state


def _restore_random(state: dict[str, str]) -> None:
    import torch

    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cpu"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
