"""One rank of test_ranks: the leader trains, prints and saves; the others follow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.trainer.device_snapshots import DeviceSnapshots
from cosmos_actor.trainer.ranks import RankedTrainer, follow, own_rank
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.flat import digest_offered
from cosmos_actor.weight_plane.flat_pool import FlatPool
from tests.trainer.make import EXAMPLES, make_engine, make_settings, sample_groups

CORRECTED = {"old_logprobs": "recomputed", "correction": {"level": "sequence", "cap": 1.2}}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapter": {"lora": {"rank": 4}, "grpo": CORRECTED},
    "merged": {"lora": {"rank": 4, "publish": "merged"}, "grpo": CORRECTED},
}
"""What is trained and published, by name."""


def main(ranks: int, directory: Path, kind: str = "whole") -> None:
    torch.set_num_threads(1)
    more = dict(KINDS[kind])
    grpo = {"kl_coefficient": 0.1, "mini_batches": 2, **more.pop("grpo", {})}
    settings = make_settings(ranks=ranks, micro_batch_tokens=40, grpo=grpo, **more)
    if own_rank() > 0:
        follow(settings)
        return
    lead(RankedTrainer(settings), directory)


def lead(trainer: RankedTrainer, directory: Path) -> None:
    """Train, save, train on; then go back to the save and do the same again, parked between the steps."""
    groups = [_as_from_another_engine(group, number)
              for number, group in enumerate(sample_groups(make_engine(trainer)))]
    trainer.sft_step(EXAMPLES)
    trainer.grpo_step(groups)
    trainer.save(directory / "policy")
    straight = [trainer.grpo_step(groups), trainer.sft_step(EXAMPLES)]
    digest = weights_digest(trainer.weights())
    snapshot = trainer.snapshot()  # by the first rank, gathered by all
    assert weights_digest(snapshot.arrays()) == digest
    trainer.snapshots_by(DeviceSnapshots(FlatPool(trainer.world.device)))
    on_device = trainer.snapshot()
    assert digest_offered(on_device.arrays()) == digest
    trainer.reset()
    trainer.load(directory / "policy")
    resumed = [_after_a_park(trainer, lambda: trainer.grpo_step(groups)),
               _after_a_park(trainer, lambda: trainer.sft_step(EXAMPLES))]
    trainer.logprobs(groups)  # FSDP2 keeps what it gathered for a forward pass alone
    _after_a_park(trainer, lambda: None)
    for before, after in zip(straight, resumed, strict=True):
        assert before["loss/total"] == after["loss/total"], (before, after)
    assert weights_digest(trainer.weights()) == weights_digest(snapshot.arrays()) == digest
    assert digest_offered(on_device.arrays()) == digest_offered(trainer.snapshot().arrays()) == digest
    np.savez(directory / "weights.npz", **trainer.weights())
    np.savez(directory / "logprobs.npz", *trainer.logprobs(groups))
    measured = [straight[0][name] for name in sorted(straight[0]) if name.startswith(("mismatch/", "correction/"))]
    losses = [metrics[name] for metrics in straight for name in ("loss/total", "grad_norm", "entropy")]
    np.savez(directory / "losses.npz", np.array(losses + measured))
    trainer.close()


def _after_a_park(trainer: RankedTrainer, step: Callable[[], Any]) -> Any:
    """What `step` gives when everything was on the host before it; nothing of this rank's shards was left."""
    trainer.park()
    for parameter in trainer.local.model.parameters():
        own = getattr(parameter, "_local_tensor", parameter)
        assert own.untyped_storage().nbytes() == 0 or own.numel() == 0
    trainer.unpark()
    return step()


def _as_from_another_engine(group: TrajectoryGroup, number: int) -> TrajectoryGroup:
    """The group with log-probs that are 0.1 nats off, and a reference."""
    off = np.random.default_rng(number).normal(0, 0.1, group.token_count).astype(np.float32)
    return replace(group, logprobs=group.logprobs + off).with_field(
        "reference_logprobs", group.logprobs - 0.1, "reference-0")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
