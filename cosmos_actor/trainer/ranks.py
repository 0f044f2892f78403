"""One trainer over several ranks: a leader that is told what to do, and followers that do the same.

    leader:    RankedTrainer.grpo_step(groups) ──broadcast(command, arrays)──> the same step on every rank
    follower:  follow(settings) repeats: wait for a command, do it

Commands are a msgpack header and raw arrays over a gloo group of their own, so that a GPU never spins while the
leader is idle. With one rank nothing of torch.distributed is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.trainer.batch import Batch, batch_from_examples, batch_from_groups, ragged
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.trainer.settings import TrainerSettings
from cosmos_actor.trainer.snapshots import Snapshot
from cosmos_actor.trainer.world import World, choose_device

MAX_HEADER_BYTES = 1 << 20
# A header names arrays; one that is larger is not a header.


def own_rank() -> int:
    """This process's rank as torch's elastic launcher says it; 0 outside of one."""
    return int(os.environ.get("RANK", "0"))


def join_world(settings: TrainerSettings) -> World:
    """Meet the other ranks. Raises BadValue when the launcher started another number than `policy.ranks`."""
    if settings.ranks == 1:
        return World.alone(settings.device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != settings.ranks:
        raise BadValue(f"the launcher started {size} ranks, the settings ask for {settings.ranks}",
                       setting="policy.ranks")
    import torch.distributed as dist

    device = choose_device(settings.device, int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=settings.collective_deadline_s))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    commands = dist.new_group(backend="gloo", timeout=timedelta(seconds=settings.command_deadline_s))
    return World(rank=dist.get_rank(), size=size, device=device, commands=commands)


class RankedTrainer:
    """The leader's trainer: every method happens on all ranks, and returns when it has happened on this one."""

    def __init__(self, settings: TrainerSettings, *, temperature: float = 1.0, world: World | None = None) -> None:
        self.settings, self.temperature = settings, temperature
        self.world = world or join_world(settings)
        self.local = PolicyTrainer(settings, temperature=temperature, world=self.world)

    def sft_step(self, examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, float]:
        """One supervised update on (prompt tokens, answer tokens) pairs."""
        return self._do("sft_step", batch_from_examples(examples))  # type: ignore[no-any-return]

    def grpo_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """See PolicyTrainer.grpo_step."""
        batch, rows = self.local.policy_batch(groups)
        return self._do("policy_step", batch, rows)  # type: ignore[no-any-return]

    def logprobs(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """See PolicyTrainer.logprobs."""
        batch = batch_from_groups(groups)
        return ragged(batch, self._do("score", batch), groups)

    def weights(self) -> dict[str, np.ndarray]:
        """See PolicyTrainer.weights."""
        return self._do("weights")  # type: ignore[no-any-return]

    def snapshots_by(self, snapshots: Any) -> None:
        """Where snapshots lie from now on: `Snapshots` on the host, or `DeviceSnapshots`. The followers have none."""
        self.local.snapshots = snapshots

    def snapshot(self) -> Snapshot:
        """See PolicyTrainer.snapshot."""
        return self._do("snapshot")  # type: ignore[no-any-return]

    def save(self, directory: str | Path) -> None:
        """See PolicyTrainer.save. All ranks write below `directory`."""
        self._do("save", directory=str(directory))

    def load(self, directory: str | Path) -> None:
        """See PolicyTrainer.load."""
        self._do("load", directory=str(directory))

    def reset(self) -> None:
        """Back to the state that the settings alone describe."""
        self._do("reset")

    def park(self) -> int:
        """See PolicyTrainer.park; the bytes are this rank's."""
        return self._do("park")  # type: ignore[no-any-return]

    def unpark(self) -> int:
        """See PolicyTrainer.unpark; the bytes are this rank's."""
        return self._do("unpark")  # type: ignore[no-any-return]

    def memory(self) -> tuple[int, int]:
        """See PolicyTrainer.memory; of this rank's device."""
        return self.local.memory()

    def close(self) -> None:
        """Let the followers go. The trainer is of no use afterwards."""
        if self.world.size > 1 and self.world.commands is not None:
            send(self.world, "stop", {}, {})
            import torch.distributed as dist

            dist.destroy_process_group()

    def _do(self, name: str, batch: Batch | None = None, rows: Sequence[np.ndarray] = (), **plain: str) -> Any:
        if self.world.size > 1:
            send(self.world, name, plain, _packed(batch, rows))
        return perform(self.local, name, plain, batch, rows)


def follow(settings: TrainerSettings, *, temperature: float = 1.0) -> None:
    """A follower's whole life: returns when the leader closes, raises when it is gone."""
    world = join_world(settings)
    local = PolicyTrainer(settings, temperature=temperature, world=world)
    while True:
        name, plain, arrays = receive(world)
        if name == "stop":
            break
        batch, rows = _unpacked(arrays)
        perform(local, name, plain, batch, rows)
    import torch.distributed as dist

    dist.destroy_process_group()


def perform(
    trainer: PolicyTrainer, name: str, plain: Mapping[str, str], batch: Batch | None, rows: Sequence[np.ndarray]
) -> Any:
    """Do one command on this rank. Raises KeyError for a command that does not exist."""
    commands: dict[str, Callable[[], Any]] = {
        "sft_step": lambda: trainer.sft_step(batch),  # type: ignore[arg-type]
        "policy_step": lambda: trainer.policy_step(batch, rows),  # type: ignore[arg-type]
        "score": lambda: trainer.score(batch),  # type: ignore[arg-type]
        "weights": trainer.weights,
        "snapshot": trainer.snapshot,
        "park": trainer.park,
        "unpark": trainer.unpark,
        "save": lambda: trainer.save(plain["directory"]),
        "load": lambda: trainer.load(plain["directory"]),
        "reset": trainer.reset,
    }
    return commands[name]()


def send(world: World, name: str, plain: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> None:
    """Leader: give every follower one command."""
    table = [[key, value.dtype.str, list(value.shape)] for key, value in arrays.items()]
    header = msgpack.packb({"name": name, "plain": dict(plain), "arrays": table})
    _broadcast(world, torch.tensor([len(header)], dtype=torch.int64))
    _broadcast(world, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    for value in arrays.values():
        if value.nbytes:
            _broadcast(world, torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)))


def receive(world: World) -> tuple[str, dict[str, str], dict[str, np.ndarray]]:
    """Follower: the leader's next command. Raises when none comes within `policy.command_deadline_s`."""
    size = int(_broadcast(world, torch.zeros(1, dtype=torch.int64))[0])
    if not 0 < size <= MAX_HEADER_BYTES:
        raise ValueError(f"a command's header of {size} bytes: leader and follower run different versions")
    header = msgpack.unpackb(bytes(_broadcast(world, torch.zeros(size, dtype=torch.uint8)).numpy()))
    arrays = {key: _receive_array(world, np.dtype(dtype), tuple(shape)) for key, dtype, shape in header["arrays"]}
    return header["name"], header["plain"], arrays


def _receive_array(world: World, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    array = np.zeros(shape, dtype=dtype)
    if array.nbytes:
        _broadcast(world, torch.from_numpy(array.reshape(-1).view(np.uint8)))
    return array


def _broadcast(world: World, tensor: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist

    dist.broadcast(tensor, src=0, group=world.commands)
    return tensor


def _packed(batch: Batch | None, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {} if batch is None else {field.name: getattr(batch, field.name) for field in fields(batch)}
    return arrays | {f"rows/{index}": part for index, part in enumerate(rows)}


def _unpacked(arrays: Mapping[str, np.ndarray]) -> tuple[Batch | None, list[np.ndarray]]:
    columns = {field.name: arrays[field.name] for field in fields(Batch) if field.name in arrays}
    rows = [value for key, value in arrays.items() if key.startswith("rows/")]
    return (Batch(**columns) if columns else None), rows
