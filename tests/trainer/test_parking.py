"""What is parked comes back bit for bit, in its tensors; meanwhile nobody computes with it, and it has no memory."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_actor.trainer import parking
from cosmos_actor.trainer.batch import batch_from_examples, batch_from_groups
from cosmos_actor.trainer.parking import Parked, ParkingPlace
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make import EXAMPLES, make_engine, make_settings, sample_groups

CPU = torch.device("cpu")


def tensors(device: str = "cpu") -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(33, 7, generator=draw).to(device)
    return [whole, whole[3:5], torch.tensor(3.5, device=device), torch.randn(257, generator=draw).to(device).bfloat16(),
            torch.zeros(0, device=device)]


def bits(found: list[torch.Tensor]) -> list[list[int]]:
    """Of copies: a storage that numpy has seen can not be emptied."""
    return [tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).tolist() for tensor in found]


@pytest.mark.parametrize("slab", [64, 1 << 20])
def test_views_and_all_dtypes_come_back_in_the_same_tensors(monkeypatch, slab):
    monkeypatch.setattr(parking, "SLAB_BYTES", slab)  # so small that tensors lie across several
    own, place = tensors(), ParkingPlace(CPU)
    before = bits(own)
    for _ in range(2):
        moved = place.park(own)
        assert moved == 33 * 7 * 4 + 4 + 257 * 2 and place.parked
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in own)
        assert place.unpark() == moved and not place.parked
        assert bits(own) == before


def test_what_numpy_has_seen_is_put_aside_and_fails_to_be_used_meanwhile():
    own, place = torch.ones(20, requires_grad=True), ParkingPlace(CPU)
    seen = own.detach().numpy()
    assert place.park([own]) == 80 and own.numel() == 0
    with pytest.raises(RuntimeError):
        own @ torch.ones(20)
    assert place.unpark() == 80 and torch.equal(own, torch.ones(20)) and seen.sum() == 20


def test_a_second_park_and_a_second_unpark_change_nothing():
    own, place = tensors(), ParkingPlace(CPU)
    before = bits(own)
    assert place.unpark() == 0
    place.park(own)
    assert place.park(own) == 0
    place.unpark()
    assert place.unpark() == 0 and bits(own) == before


def test_host_memory_is_made_once_and_grows_with_what_is_parked():
    own, place = tensors(), ParkingPlace(CPU)
    place.park(own)
    where = [slab.data_ptr() for slab in place._slabs]
    place.unpark()
    more = torch.ones(1000)
    place.park([*own, more])
    assert [slab.data_ptr() for slab in place._slabs[:len(where)]] == where
    place.unpark()
    assert torch.equal(more, torch.ones(1000))


def test_what_is_constant_crosses_once_and_what_changes_each_time():
    frozen, changing, place = torch.ones(50), torch.zeros(50), ParkingPlace(CPU)
    place.park([changing], [frozen])
    place.unpark()
    frozen.fill_(9.0)  # which nobody does: it shows that the first copy counts
    changing.fill_(2.0)
    place.park([changing], [frozen])
    place.unpark()
    assert torch.equal(frozen, torch.ones(50)) and torch.equal(changing, torch.full((50,), 2.0))
    other = torch.full((60,), 7.0)
    place.park([changing], [other])
    place.unpark()
    assert torch.equal(other, torch.full((60,), 7.0))


def test_what_is_void_has_memory_again_and_costs_none_on_the_host():
    kept, dropped, place = torch.ones(50), torch.ones(5000), ParkingPlace(CPU)
    place.park([kept, dropped], void=[dropped])
    assert dropped.untyped_storage().nbytes() == 0 and sum(len(slab) for slab in place._slabs) == 200
    place.unpark()
    dropped.fill_(3.0)
    assert torch.equal(kept, torch.ones(50)) and dropped.sum() == 15000


def test_without_memory_to_come_back_to_it_stays_parked_and_can_come_later(monkeypatch):
    own, place = tensors(), ParkingPlace(CPU)
    before = bits(own)
    place.park(own)
    sizes = place._sizes
    place._sizes = [sizes[0], 1 << 62, *sizes[2:]]  # more than any machine has
    with pytest.raises(RuntimeError):
        place.unpark()
    assert place.parked and all(tensor.untyped_storage().nbytes() == 0 for tensor in own)
    place._sizes = sizes
    place.unpark()
    assert bits(own) == before


def trained(steps: int = 2, **fields) -> PolicyTrainer:
    trainer = PolicyTrainer(make_settings(**fields))
    for _ in range(steps):
        trainer.sft_step(batch_from_examples(EXAMPLES))
    return trainer


@pytest.mark.parametrize("kind", ["whole", "adapter", "merged"])
def test_a_trainer_that_was_parked_goes_on_bit_for_bit(kind):
    lora = {} if kind == "whole" else {"lora": {"rank": 4, "publish": kind}}
    if lora:
        pytest.importorskip("peft")
    one, other = trained(**lora), trained(**lora)
    groups = sample_groups(make_engine(one))
    for _ in range(3):
        size = sum(tensor.nbytes for tensor in {id(p): p for p in other.model.parameters()}.values())
        assert other.park() >= size + 2 * sum(p.nbytes for p in other.model.parameters() if p.requires_grad)
        assert all(p.untyped_storage().nbytes() == 0 and p.grad is None for p in other.model.parameters())
        assert other.unpark() >= size
        same = [{name: value for name, value in trainer.grpo_step(groups).items() if "seconds" not in name}
                for trainer in (one, other)]
        assert same[0] == same[1]
        assert weights_digest(one.weights()) == weights_digest(other.weights())


def test_before_the_first_step_there_are_no_moments_and_it_can_be_parked():
    one, other = trained(0), trained(0)
    other.park()
    other.unpark()
    step = batch_from_examples(EXAMPLES)
    assert one.sft_step(step)["loss/total"] == other.sft_step(step)["loss/total"]
    assert weights_digest(one.weights()) == weights_digest(other.weights())


@pytest.mark.parametrize("what", ["sft_step", "score", "weights", "snapshot", "save"])
def test_whatever_needs_the_model_is_refused_by_name_while_it_is_parked(tmp_path: Path, what):
    trainer = trained()
    batch = batch_from_examples(EXAMPLES)
    calls = {"sft_step": lambda: trainer.sft_step(batch), "weights": trainer.weights, "snapshot": trainer.snapshot,
             "save": lambda: trainer.save(tmp_path), "score": lambda: trainer.score(batch)}
    updates = copy.deepcopy(trainer.updates)
    trainer.park()
    with pytest.raises(Parked, match=r"not its turn on the GPU \(run\.colocated_offload\)"):
        calls[what]()
    assert trainer.updates == updates and not list(tmp_path.iterdir())
    trainer.unpark()
    calls[what]()


def test_a_snapshot_that_was_taken_before_stays_what_it_is():
    trainer = trained()
    snapshot, digest = trainer.snapshot(), weights_digest(trainer.weights())
    assert snapshot is not None
    trainer.park()
    assert weights_digest(snapshot.arrays()) == digest
    trainer.unpark()
    trainer.sft_step(batch_from_examples(EXAMPLES))
    assert weights_digest(snapshot.arrays()) == digest != weights_digest(trainer.weights())


def test_a_load_and_a_reset_bring_a_parked_trainer_back(tmp_path: Path):
    trainer, groups = trained(), sample_groups(make_engine(trained()))
    trainer.save(tmp_path / "policy")
    digest, scores = weights_digest(trainer.weights()), trainer.score(batch_from_groups(groups))
    trainer.sft_step(batch_from_examples(EXAMPLES))
    trainer.park()
    trainer.load(tmp_path / "policy")
    assert weights_digest(trainer.weights()) == digest
    assert np.array_equal(trainer.score(batch_from_groups(groups)), scores)
    trainer.park()
    trainer.reset()
    assert weights_digest(trainer.weights()) == weights_digest(trained(0).weights())


def in_use() -> int:
    return torch.cuda.memory_reserved()


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_free_meanwhile_and_the_bits_are_the_same():
    fields = {"model": "tiny:qwen3?hidden=1024&layers=4&heads=8&kv_heads=8&intermediate=4096&vocab=32&positions=64",
              "device": "cuda"}
    trainer = trained(**fields)
    digest, taken = weights_digest(trainer.weights()), in_use()
    moments = [tensor.clone().cpu() for state in trainer.optimizer.state.values() for tensor in state.values()]
    snapshot = trainer.snapshot()  # its copies may be under way when everything goes
    assert snapshot is not None
    moved = trainer.park()
    assert moved > 3 * sum(p.numel() * 4 for p in trainer.model.parameters()) * 0.99
    assert in_use() < 32 << 20 < taken
    assert weights_digest(snapshot.arrays()) == digest
    trainer.unpark()
    assert weights_digest(trainer.weights()) == digest
    after = [tensor.cpu() for state in trainer.optimizer.state.values() for tensor in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(moments, after, strict=True))
    trainer.sft_step(batch_from_examples(EXAMPLES))


@pytest.mark.gpu
def test_on_a_gpu_the_bytes_wait_in_pinned_memory():
    own, place = tensors("cuda"), ParkingPlace(torch.device("cuda"))
    before = bits(own)
    place.park(own)
    assert all(slab.is_pinned() for slab in place._slabs)
    place.unpark()
    assert bits(own) == before
