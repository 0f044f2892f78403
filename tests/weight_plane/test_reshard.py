"""From the trainer's shards to an engine's ranks: every element once, nothing more, and what a gather would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.weight_plane.engine_layout import engine_ranks, parameter_of
from cosmos_actor.weight_plane.reshard import (
    SPLIT_ELEMENTS,
    Box,
    CanNotReshard,
    Destination,
    Held,
    Mesh,
    Need,
    bytes_received,
    bytes_sent,
    carry_out,
    held_by,
    index,
    plan_copies,
    shape_of,
    whole,
)

HEAD, HIDDEN, VOCABULARY = 2, 10, 37
MESHES = [*(Mesh(1, ranks) for ranks in range(1, 9)), Mesh(2, 1), Mesh(2, 2), Mesh(2, 3), Mesh(4, 2), Mesh(3, 1)]


def shapes_of(ranks: int, kv_heads: int, *, tied: bool = True, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """A model of two layers whose sizes an engine of `ranks` can cut; most of them no multiple of a trainer's ranks."""
    heads, wide = 2 * ranks, 10 * ranks
    layer = {"self_attn.q_proj.weight": (heads * HEAD, HIDDEN), "self_attn.k_proj.weight": (kv_heads * HEAD, HIDDEN),
             "self_attn.v_proj.weight": (kv_heads * HEAD, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, heads * HEAD),
             "self_attn.q_norm.weight": (HEAD,), "mlp.gate_proj.weight": (wide, HIDDEN),
             "mlp.up_proj.weight": (wide, HIDDEN), "mlp.down_proj.weight": (HIDDEN, wide),
             "input_layernorm.weight": (HIDDEN,)}
    if bias:
        layer |= {"self_attn.q_proj.bias": (heads * HEAD,), "self_attn.k_proj.bias": (kv_heads * HEAD,),
                  "self_attn.v_proj.bias": (kv_heads * HEAD,), "self_attn.o_proj.bias": (HIDDEN,)}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in (0, 1):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes if tied else shapes | {"lm_head.weight": (VOCABULARY, HIDDEN)}


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Each element another number, over all tensors."""
    made, first = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        made[name] = np.arange(first, first + count, dtype=np.float32).reshape(shape)
        first += count
    return made


def shards_of(full: dict[str, np.ndarray], held: dict[str, Held], mesh: Mesh) -> list[dict[str, np.ndarray]]:
    """As torch.chunk would have it, by another way than the planner's."""
    made: list[dict[str, np.ndarray]] = [{} for _ in range(mesh.ranks)]
    for name, array in full.items():
        for rank in range(mesh.ranks):
            dim, part = held[name].dim, array
            if dim is not None:
                step = -(-array.shape[dim] // mesh.shards)
                part = np.take(array, range(*slice(rank % mesh.shards * step, (rank % mesh.shards + 1) * step).indices(
                    array.shape[dim])), axis=dim)
            made[rank][name] = part.copy()
    return made


def gathered(full: dict[str, np.ndarray], ranks: int, kv_heads: int, padding: int) -> list[dict[str, np.ndarray]]:
    """What each rank has when it is given whole tensors and cuts them itself, as vLLM's loaders do."""
    made: list[dict[str, np.ndarray]] = []
    for rank in range(ranks):
        own: dict[str, np.ndarray] = {}
        kv = list(range(rank * kv_heads // ranks, rank * kv_heads // ranks + max(1, kv_heads // ranks)))
        for name, array in full.items():
            if "q_proj" in name or "gate_proj" in name or "up_proj" in name:
                part = np.split(array, ranks)[rank]
            elif "k_proj" in name or "v_proj" in name:
                part = np.concatenate([array[head * HEAD : (head + 1) * HEAD] for head in kv])
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                part = np.split(array, ranks, axis=1)[rank]
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                short = -len(array) % padding
                part = np.split(np.concatenate([array, np.zeros((short, array.shape[1]), array.dtype)]), ranks)[rank]
            else:
                part = array
            parameter = parameter_of(name)
            own[parameter] = part if parameter not in own else np.concatenate([own[parameter], part])
        made.append(own)
    return made


def check_once(destination: Destination, plan: Any, number: int) -> None:
    """Each element that is needed is written once, and no other."""
    times = {name: np.zeros(shape, int) for name, shape in destination.parameters.items()}
    for (_, to), copies in plan.items():
        for copy in copies if to == number else ():
            assert shape_of(copy.source) == shape_of(copy.target)
            times[copy.parameter][index(copy.target)] += 1
    wanted = {name: np.zeros(shape, int) for name, shape in destination.parameters.items()}
    for need in destination.needs:
        wanted[need.parameter][index(need.target)] += 1
    for name, counts in times.items():
        assert (counts == wanted[name]).all() and wanted[name].max(initial=0) <= 1


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_fills_every_engine_as_a_gather_would(mesh: Mesh, ranks: int) -> None:
    heads_of = sorted({1, ranks, 2 * ranks} | ({2} if ranks % 2 == 0 else set()))
    for kv_heads in heads_of:
        shapes, padding = shapes_of(ranks, kv_heads, tied=kv_heads == 1), 4 * ranks
        full = weights(shapes)
        held = {name: Held(shape, None if "norm" in name else 1 if "up_proj.w" in name else 0)
                for name, shape in shapes.items()}
        destinations = engine_ranks(shapes, ranks, heads=2 * ranks, kv_heads=kv_heads, padding=padding)
        plan = plan_copies(held, mesh, destinations)
        filled: list[dict[str, Any]] = [
            {name: np.zeros(shape, np.float32) for name, shape in own.parameters.items()} for own in destinations]
        carry_out(plan, shards_of(full, held, mesh), filled)
        for number, (own, right) in enumerate(zip(filled, gathered(full, ranks, kv_heads, padding), strict=True)):
            assert sorted(own) == sorted(right)
            assert all(np.array_equal(own[name], right[name]) for name in own)
            check_once(destinations[number], plan, number)
        sizes = dict.fromkeys(shapes, 4)
        moved = sum(bytes_received(plan, number, sizes) for number in range(ranks))
        assert moved == 4 * sum(own.elements() for own in destinations)


def test_an_engine_replica_is_sent_its_share_and_each_rank_of_it_no_whole_model() -> None:
    """With as many key and value heads as ranks, the replica's share is the model, norms aside."""
    shapes = shapes_of(4, 4, bias=False) | {"model.embed_tokens.weight": (4096, HIDDEN)}
    held = {name: Held(shape, 0) for name, shape in shapes.items()}
    destinations = engine_ranks(shapes, 4, heads=8, kv_heads=4)
    plan = plan_copies(held, Mesh(2, 3), destinations)
    model = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    received = [bytes_received(plan, number, dict.fromkeys(shapes, 4)) for number in range(4)]
    assert model <= sum(received) <= 1.05 * model
    assert max(received) <= 1.05 * model / 4


@pytest.mark.parametrize("engines", [1, 3])
def test_replicas_of_the_trainer_send_evenly(engines: int) -> None:
    shapes = {f"model.layers.{number}.mlp.up_proj.weight": (768, 1024) for number in range(5)}
    held = {name: Held(shape, 0) for name, shape in shapes.items()}
    destinations = engines * engine_ranks(shapes, 2, heads=2, kv_heads=2)
    mesh = Mesh(4, 2)
    plan = plan_copies(held, mesh, destinations)
    sent = [bytes_sent(plan, rank, dict.fromkeys(shapes, 4)) for rank in range(mesh.ranks)]
    assert sum(sent) == engines * 4 * 5 * 768 * 1024
    assert max(sent) <= 1.05 * sum(sent) / mesh.ranks


def test_what_all_ranks_have_is_sent_by_all_of_them_when_it_is_large() -> None:
    held = {"large": Held((SPLIT_ELEMENTS, 3), None), "small": Held((8,), None), "scalar": Held((), None)}
    destination = Destination({name: tensor.shape for name, tensor in held.items()},
                              [Need(name, whole(tensor.shape), name, whole(tensor.shape))
                               for name, tensor in held.items()])
    plan = plan_copies(held, Mesh(3, 1), [destination])
    assert [len([copy for copy in plan[rank, 0] if copy.tensor == "large"]) for rank in range(3)] == [1, 1, 1]
    check_once(destination, plan, 0)


@st.composite
def problems(draw: Any) -> tuple[dict[str, Held], Mesh, list[Destination]]:
    """Any tensors, cut in any dimension over any mesh; each destination wants a part of some, which does not overlap
    another part of its parameter."""
    mesh = Mesh(draw(st.integers(1, 3)), draw(st.integers(1, 8)))
    held = {}
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
        held[f"t{number}"] = Held(shape, draw(st.sampled_from([None, *range(len(shape))])))
    return held, mesh, [draw(_destination(held)) for _ in range(draw(st.integers(1, 3)))]


@st.composite
def _destination(draw: Any, held: dict[str, Held]) -> Destination:
    made = Destination()
    for name, tensor in held.items():
        box: Box = tuple((low, draw(st.integers(low, length)))
                         for length in tensor.shape for low in [draw(st.integers(0, length))])
        shift = draw(st.integers(0, 2))
        made.needs.append(Need(name, box, name, tuple((shift, shift + high - low) for low, high in box)))
        made.parameters[name] = tuple(shift + high - low + draw(st.integers(0, 1)) for low, high in box)
    return made


@settings(max_examples=150, deadline=None)
@given(problems())
def test_any_parts_of_any_tensors_arrive_once(problem: Any) -> None:
    held, mesh, destinations = problem
    full = weights({name: tensor.shape for name, tensor in held.items()})
    plan = plan_copies(held, mesh, destinations)
    filled = [{name: np.zeros(shape, np.float32) for name, shape in own.parameters.items()} for own in destinations]
    carry_out(plan, shards_of(full, held, mesh), filled)
    for number, destination in enumerate(destinations):
        check_once(destination, plan, number)
        for need in destination.needs:
            assert np.array_equal(filled[number][need.parameter][index(need.target)],
                                  full[need.tensor][index(need.source)])
    assert plan == plan_copies(held, mesh, destinations)


def test_what_can_not_be_cut_is_named() -> None:
    shapes = shapes_of(2, 2)
    for ranks, settings_, line in (
            (3, {"heads": 4, "kv_heads": 2}, "4 attention heads"),
            (4, {"heads": 4, "kv_heads": 3}, "3 heads go neither into nor onto 4 ranks"),
            (4, {"heads": 4, "kv_heads": 2, "padding": 6}, "padded rows are not cut into 4"),
            (8, {"heads": 8, "kv_heads": 2, "padding": 8}, "gate_proj.weight of [20, 10]")):
        with pytest.raises(CanNotReshard, match=line.replace("[", r"\[").replace("]", r"\]")):
            engine_ranks(shapes, ranks, **settings_)  # type: ignore[arg-type]
    destination = Destination({"w": (2,)}, [Need("w", ((0, 2),), "w", ((0, 2),))])
    for held in ({}, {"w": Held((1,), 0)}):
        with pytest.raises(CanNotReshard, match="which the trainer has"):
            plan_copies(held, Mesh(1, 1), [destination])


def test_torch_tensors_are_copied_as_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    shapes = shapes_of(2, 1)
    full, mesh = weights(shapes), Mesh(2, 3)
    held = {name: Held(shape, 0) for name, shape in shapes.items()}
    destinations = engine_ranks(shapes, 2, heads=4, kv_heads=1)
    shards = [{name: torch.from_numpy(array).bfloat16() for name, array in own.items()}
              for own in shards_of(full, held, mesh)]
    filled = [{name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in own.parameters.items()}
              for own in destinations]
    carry_out(plan_copies(held, mesh, destinations), shards, filled)
    right = gathered({name: torch.from_numpy(array).bfloat16().float().numpy() for name, array in full.items()}, 2, 1,
                     64)
    for own, want in zip(filled, right, strict=True):
        assert all(np.array_equal(own[name].float().numpy(), want[name]) for name in want)


@pytest.fixture
def fake_ranks() -> Any:
    """torch.distributed as rank 4 of 6, without the others."""
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=4, world_size=6, store=FakeStore())
    yield torch
    torch.distributed.destroy_process_group()


def test_dtensors_of_fsdp_are_held_as_torch_cuts_them(fake_ranks: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch = fake_ranks
    for sizes, outer in (((6,), []), ((2, 3), [Replicate()])):
        made = init_device_mesh("cpu", sizes)
        tensors = {f"{rows}": distribute_tensor(torch.zeros(rows, 2), made, [*outer, Shard(0)])
                   for rows in (1, 2, 5, 7, 12, 13)}
        tensors["norm"] = distribute_tensor(torch.zeros(3), made, [*outer, Replicate()])
        mesh, held = held_by(tensors | {"plain": torch.zeros(2)})
        assert mesh == (Mesh(1, 6) if len(sizes) == 1 else Mesh(2, 3))
        for name, tensor in tensors.items():
            local = tensor.to_local()
            assert shape_of(held[name].boxes(mesh)[4 % mesh.shards]) == tuple(local.shape)
        assert held["norm"].dim is None and held["plain"].dim is None
    wrong = distribute_tensor(torch.zeros(4, 4), made, [Shard(0), Shard(1)])
    with pytest.raises(CanNotReshard, match="no FSDP2 or HSDP"):
        held_by({"w": wrong})
