"""A snapshot that stays on the device keeps the promises of one on the host, in memory that others pull from."""

from __future__ import annotations

import pytest
import torch

from cosmos_actor.trainer.device_snapshots import DeviceSnapshots
from cosmos_actor.trainer.model_weights import host_copies
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import ManifestInvalid
from cosmos_actor.weight_plane.flat import digest_offered
from cosmos_actor.weight_plane.flat_pool import FlatPool, NoFreeBuffer
from tests.trainer.test_snapshots import model

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


def snapshots(device: str = "cpu") -> DeviceSnapshots:
    return DeviceSnapshots(FlatPool(torch.device(device)))


@DEVICES
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_it_holds_what_a_copy_holds(dtype, device):
    own = model(device=device)
    copies = host_copies((name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
                         for name, tensor in own.items())
    found = snapshots(device).take(own, dtype).arrays()
    assert digest_offered(found) == weights_digest(copies)
    assert all(tensor.device == torch.device(device) for tensor in found.values())


@DEVICES
def test_it_stays_what_it_is_while_the_weights_change_and_two_may_be_in_use(device):
    made, own = snapshots(device), model(device=device)
    first, digests = made.take(own), []
    digests.append(digest_offered(first.arrays()))
    made.before_a_write()
    own["embed"].add_(1.0)
    second = made.take(own)
    digests.append(digest_offered(second.arrays()))
    own["embed"].zero_()
    made.settle()
    assert [digest_offered(first.arrays()), digest_offered(second.arrays())] == digests
    assert digests[0] != digests[1]
    with pytest.raises(NoFreeBuffer):
        made.take(own)


def test_its_memory_is_used_again_only_when_nobody_holds_it():
    made, own = snapshots(), model()
    first, other = made.take(own), made.take(own)
    where = first.arrays()["embed"].data_ptr()
    published = made.pool.hold(first.arrays().flat)
    first.release()
    first.release()
    with pytest.raises(NoFreeBuffer):
        made.take(own)
    assert not made.pool.wait_for_room(0.01)
    published.release()
    assert made.pool.wait_for_room(0.0) and made.take(own).arrays()["embed"].data_ptr() == where
    other.release()


def test_sharded_tensors_are_gathered_and_a_failure_keeps_no_buffer():
    made = snapshots()

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a rank is gone")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            made.take(model(), whole=fails)
    with pytest.raises(ManifestInvalid, match="odd is float8_e4m3fn"):
        made.take({"odd": torch.zeros(3, dtype=torch.float8_e4m3fn)})
    halves = {name: tensor / 2 for name, tensor in model().items()}
    taken = [made.take(halves, torch.float32, whole=lambda tensor: tensor * 2) for _ in range(2)]
    assert all(torch.equal(one.arrays()["embed"], model()["embed"]) for one in taken)


def test_a_device_without_room_is_one_line_that_names_the_setting_and_the_next_try_is_free():
    full = [True]

    def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    made = DeviceSnapshots(FlatPool(torch.device("cpu"), allocate=allocate))
    for _ in range(3):
        with pytest.raises(NoFreeBuffer, match=r"not fit beside what else is on cpu; weights\.transport = \"shm\""):
            made.take(model())
    full.clear()
    made.take(model())


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_follows_at_once_does_not_reach_it():
    made, own = snapshots("cuda:0"), {"embed": torch.randn(4096, 4096, device="cuda")}
    for _ in range(5):
        before = own["embed"].clone()
        snapshot = made.take(own)
        made.before_a_write()
        own["embed"].add_(1.0)
        assert torch.equal(snapshot.arrays()["embed"], before)
        snapshot.release()
