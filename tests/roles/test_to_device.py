"""Tensors of the host that reach a device through two pieces of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.roles import to_device
from cosmos_actor.roles.to_device import ALIGNED_BYTES, Part, copy_to_device, cut


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(1, 8).map(lambda times: ALIGNED_BYTES * times))
def test_every_byte_of_every_tensor_has_one_place_in_one_piece(sizes: list[int], piece_bytes: int) -> None:
    found: list[tuple[int, int]] = []
    for parts in cut(sizes, piece_bytes):
        taken: set[int] = set()
        for part in parts:
            places = set(range(part.at, part.at + part.end - part.begin))
            assert part.begin < part.end and part.at % ALIGNED_BYTES == 0 and max(places) < piece_bytes
            assert not places & taken
            taken |= places
            found += [(part.tensor, byte) for byte in range(part.begin, part.end)]
    assert found == [(tensor, byte) for tensor, size in enumerate(sizes) for byte in range(size)]


def test_a_tensor_goes_on_in_the_next_piece() -> None:
    assert list(cut([20, 100, 0], 64)) == [[Part(0, 0, 20, 0), Part(1, 0, 32, 32)], [Part(1, 32, 96, 0)],
                                           [Part(1, 96, 100, 0)]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("piece_bytes", [ALIGNED_BYTES, 1 << 12, 1 << 20])
def test_what_arrives_is_what_was_sent(monkeypatch: pytest.MonkeyPatch, piece_bytes: int, device: str) -> None:
    monkeypatch.setattr(to_device, "PIECE_BYTES", piece_bytes)
    draw = torch.Generator().manual_seed(piece_bytes)
    sent = [torch.randn(shape, generator=draw).to(dtype) for shape, dtype in (
        ((50, 40), torch.bfloat16), ((3,), torch.float32), ((), torch.float64), ((0, 4), torch.float32),
        ((700,), torch.bfloat16), ((9, 9), torch.int64))]
    sent.append(torch.randn(30, 20, generator=draw).T)
    table = torch.full((90, 40), 7.0, dtype=torch.bfloat16, device=device)
    targets = [table[20:70], *(torch.zeros_like(one, device=device, memory_format=torch.contiguous_format)
                               for one in sent[1:])]
    copy_to_device(sent, targets)
    for one, target in zip(sent, targets, strict=True):
        assert torch.equal(one, target.cpu())
    assert table[:20].eq(7).all() and table[70:].eq(7).all()
    copy_to_device([], [])


@pytest.mark.parametrize("target", [torch.zeros(3, 4).T, torch.zeros(4, 4), torch.zeros(4, 3, dtype=torch.bfloat16)],
                         ids=["strided", "shape", "dtype"])
def test_a_target_that_bytes_can_not_be_copied_into_is_refused_before_the_first(target: torch.Tensor) -> None:
    first = torch.zeros(2)
    with pytest.raises(ValueError, match="does not go into"):
        copy_to_device([torch.ones(2), torch.ones(4, 3)], [first, target])
    assert not first.any() and not target.any()
