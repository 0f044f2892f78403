"""One rank of test_ranks: the leader trains, prints and saves; the others follow."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from cosmos_actor.trainer.ranks import RankedTrainer, follow, own_rank
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make import EXAMPLES, make_engine, make_settings, sample_groups


def main(ranks: int, directory: Path) -> None:
    torch.set_num_threads(1)
    settings = make_settings(ranks=ranks, micro_batch_tokens=40, grpo={"kl_coefficient": 0.1, "mini_batches": 2})
    if own_rank() > 0:
        follow(settings)
        return
    lead(RankedTrainer(settings), directory)


def lead(trainer: RankedTrainer, directory: Path) -> None:
    """Train, save, train on; then go back to the save and do the same again."""
    groups = [group.with_field("reference_logprobs", group.logprobs - 0.1, "reference-0")
              for group in sample_groups(make_engine(trainer))]
    trainer.sft_step(EXAMPLES)
    trainer.grpo_step(groups)
    trainer.save(directory / "policy")
    straight = [trainer.grpo_step(groups), trainer.sft_step(EXAMPLES)]
    digest = weights_digest(trainer.weights())
    trainer.reset()
    trainer.load(directory / "policy")
    resumed = [trainer.grpo_step(groups), trainer.sft_step(EXAMPLES)]
    for before, after in zip(straight, resumed, strict=True):
        assert before["loss/total"] == after["loss/total"], (before, after)
    assert weights_digest(trainer.weights()) == digest
    np.savez(directory / "weights.npz", **trainer.weights())
    np.savez(directory / "logprobs.npz", *trainer.logprobs(groups))
    losses = [metrics[name] for metrics in straight for name in ("loss/total", "grad_norm", "entropy")]
    np.savez(directory / "losses.npz", np.array(losses))
    trainer.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
