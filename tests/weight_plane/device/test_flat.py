"""All tensors of a version in a few buffers: their digests come out of one pass, and are those of each tensor."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from cosmos_actor.weight_plane.device_digest import (  # noqa: E402
    agrees,
    agrees_where_they_lie,
    array_of,
    block_sums_on,
    copy_all,
    dtype_name,
    kernel_of,
    scattered_kernel_of,
    sum_eagerly,
    tensor_digests_on,
    tensor_digests_packed,
    weights_digest_on,
)
from cosmos_actor.weight_plane.digest import BLOCK_BYTES, tensor_digests, weights_digest  # noqa: E402
from cosmos_actor.weight_plane.errors import ManifestInvalid  # noqa: E402
from cosmos_actor.weight_plane.flat import Flat, digest_offered  # noqa: E402
from cosmos_actor.weight_plane.flat_layout import arranged  # noqa: E402

from .models import torch_model  # noqa: E402

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def contents_of(tensors):
    return {name: (dtype_name(one), tuple(one.shape)) for name, one in tensors.items()}


def arrays_of(tensors):
    return {name: array_of(one.cpu()) for name, one in tensors.items()}


def a_flat(tensors, bucket_bytes=1 << 20, device="cpu"):
    flat = Flat(arranged(contents_of(tensors), bucket_bytes), torch.device(device))
    flat.fill(tensors)
    return flat


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket_bytes", [BLOCK_BYTES, 1 << 20, 1 << 30])
def test_digests_of_a_flat_are_those_of_its_tensors_bit_for_bit(bucket_bytes, device):
    model = torch_model(1, device)
    flat = a_flat(model, bucket_bytes, device)
    assert flat.digests() == tensor_digests(arrays_of(model))
    assert digest_offered(flat.tensors()) == weights_digest(arrays_of(model)) == weights_digest_on(model)
    assert all(torch.equal(flat.tensors()[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scratch_bytes", [BLOCK_BYTES, 1 << 19, 1 << 30])
def test_tensors_that_are_packed_for_it_have_the_same_digests(scratch_bytes, device):
    model = torch_model(2, device)
    assert tensor_digests_packed(model, torch.device(device), scratch_bytes) == tensor_digests(arrays_of(model))


def test_every_tensor_begins_a_block_and_lies_in_one_bucket():
    layout = arranged(contents_of(torch_model(1)), 1 << 20)
    assert len(layout.buckets) > 2 and layout.nbytes == sum(layout.buckets)
    for place in layout.places.values():
        assert place.offset % BLOCK_BYTES == 0 and place.offset + place.nbytes <= layout.buckets[place.bucket]


def test_what_is_used_again_has_no_trace_of_the_version_before():
    first, second = torch_model(1), torch_model(2)
    flat = a_flat(first)
    flat.fill(second)
    assert flat.digests() == tensor_digests(arrays_of(second))


def test_a_byte_in_a_gap_is_a_damaged_tensor_too():
    model = torch_model(1)
    flat = a_flat(model)
    place = flat.layout.places["layers.3.norm"]
    flat.buffers[place.bucket][place.offset + place.nbytes + 100] ^= 1
    right = tensor_digests(arrays_of(model))
    assert [name for name, digest in flat.digests().items() if digest != right[name]] == ["layers.3.norm"]


def test_copies_are_cast_as_torch_casts_them_and_grouped_by_dtype():
    sources = [torch.randn(5, 3), torch.randn(4).double(), torch.arange(6), torch.zeros(0)]
    targets = [torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(6, dtype=torch.int64),
               torch.zeros(0)]
    copy_all(targets, sources)
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))


def test_nothing_and_what_can_not_travel_are_refused():
    with pytest.raises(ManifestInvalid, match="no tensors"):
        arranged({})
    with pytest.raises(ManifestInvalid, match="w is float8_e4m3fn"):
        arranged({"w": ("float8_e4m3fn", (3,))})


def test_arrays_and_tensors_of_one_offer_have_one_digest():
    arrays = arrays_of(torch_model(3))
    mixed = {name: torch_model(3)[name] if number % 2 else array for number, (name, array) in enumerate(arrays.items())}
    assert digest_offered(mixed) == digest_offered(arrays) == weights_digest(arrays)


def test_a_kernel_that_finds_other_sums_is_not_used():
    def off_by_one(words, keys, sums):
        sum_eagerly(words, keys, sums)
        sums[-1, 1] += 1

    assert agrees(sum_eagerly, CPU) and not agrees(off_by_one, CPU)
    assert kernel_of(CPU) is None


def test_a_kernel_that_is_wrong_for_what_lies_anywhere_is_not_used():
    def of_memory(wrong):
        def sums_of(places, keys, sums):
            found = [block_sums_on(torch.frombuffer((ctypes.c_int32 * words).from_address(at), dtype=torch.int32))
                     for at, words in places]
            sums.copy_(torch.cat(found))
            sums[-1, 0] += wrong
        return sums_of

    assert agrees_where_they_lie(of_memory(0), CPU) and not agrees_where_they_lie(of_memory(1), CPU)
    assert scattered_kernel_of(CPU) is None


def test_runs_are_all_that_lies_there_and_no_more_than_dtypes_change():
    model = torch_model(1)
    kinds = 1 + sum(one.dtype != other.dtype for one, other in pairwise(model.values()))
    for bucket_bytes in (1 << 20, 1 << 30):
        flat = a_flat(model, bucket_bytes)
        runs = flat.runs()
        assert sum(map(torch.count_nonzero, runs)) == sum(map(torch.count_nonzero, model.values()))
        assert len(runs) < kinds + len(flat.layout.buckets)


@pytest.mark.gpu
def test_tensors_anywhere_on_a_gpu_have_the_digests_of_the_host():
    pytest.importorskip("triton")
    device = torch.device("cuda", 0)
    assert scattered_kernel_of(device) is not None, "it fell back on packing"
    memory = torch.randn(1 << 20, device=device).to(torch.bfloat16)
    odd = {"not aligned": memory[1:9], "not whole": memory[:7], "strided": memory.view(1024, 1024)[:, 3:19],
           "one": memory[0], "none": memory[:0], "rows": memory.view(1024, 1024)[5:700], "block": memory[:1 << 15]}
    model = {**torch_model(1, "cuda"), **odd}
    for _ in range(2):
        assert tensor_digests_on(model) == tensor_digests(arrays_of(model))
        memory[3] += 1


@pytest.mark.gpu
def test_the_kernel_of_a_gpu_finds_the_sums_of_torch():
    pytest.importorskip("triton")
    device = torch.device("cuda", 0)
    kernel = kernel_of(device)
    assert kernel is not None, "it fell back on torch's operations"
    for blocks in (1, 3, 64, 1001):
        payload = torch.randint(0, 256, (blocks * BLOCK_BYTES,), dtype=torch.uint8, device=device)
        found = block_sums_on(payload).cpu().numpy()
        assert np.array_equal(found, block_sums_on(payload.cpu()).numpy())
