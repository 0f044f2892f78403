"""A snapshot is the weights at the moment it was taken, whatever the optimiser does next, in memory that is reused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_actor.trainer.model_weights import host_copies
from cosmos_actor.trainer.snapshots import Snapshots
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.flat_pool import NoFreeBuffer


def model(seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = {"embed": torch.randn(33, 7, generator=draw), "norm": torch.randn(5, generator=draw),
            "scalar": torch.tensor(3.5), "steps": torch.tensor([1, 2, 3])}
    return {name: tensor.to(device) for name, tensor in made.items()}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_it_holds_what_a_copy_holds(dtype):
    own = model()
    copies = host_copies((name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
                         for name, tensor in own.items())
    snapshot = Snapshots().take(own, dtype)
    assert weights_digest(snapshot.arrays()) == weights_digest(copies)


def test_it_stays_what_it_is_while_the_weights_change_and_two_may_be_in_use():
    snapshots, own = Snapshots(), model()
    first, digests = snapshots.take(own), []
    digests.append(weights_digest(first.arrays()))
    own["embed"].add_(1.0)
    second = snapshots.take(own)
    digests.append(weights_digest(second.arrays()))
    own["embed"].zero_()
    assert [weights_digest(first.arrays()), weights_digest(second.arrays())] == digests
    assert digests[0] != digests[1]
    with pytest.raises(NoFreeBuffer):
        snapshots.take(own)


def test_its_memory_is_used_again_and_a_second_release_frees_nothing_of_another():
    snapshots, own = Snapshots(), model()
    first, other = snapshots.take(own), snapshots.take(own)
    where = first.arrays()["embed"].ctypes.data
    first.release()
    first.release()
    again = snapshots.take(own)
    assert again.arrays()["embed"].ctypes.data == where
    with pytest.raises(NoFreeBuffer):
        snapshots.take(own)
    other.release()


def test_another_model_gets_memory_of_its_own_and_a_failure_keeps_no_buffer():
    snapshots = Snapshots()
    snapshots.take(model()).release()

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a rank is gone")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            snapshots.take(model(), whole=fails)
    larger = {"embed": torch.ones(50, 50)}
    held = [snapshots.take(larger) for _ in range(2)]
    assert all(np.array_equal(snapshot.arrays()["embed"], np.ones((50, 50), np.float32)) for snapshot in held)


@pytest.mark.gpu
def test_from_a_gpu_a_step_that_follows_at_once_does_not_reach_it():
    snapshots, own = Snapshots(), {"embed": torch.randn(4096, 4096, device="cuda")}
    before = host_copies(own.items())
    for _ in range(5):
        snapshot = snapshots.take(own)
        snapshots.before_a_write()
        own["embed"].add_(1.0)
        assert np.array_equal(snapshot.arrays()["embed"], before["embed"])
        snapshot.release()
        before = host_copies(own.items())
