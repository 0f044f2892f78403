"""The part of `weights.py` for what lies on a device: groups of two, mapped memory, digests there."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from weights_peer import shapes
from weights_table import DEADLINE_S, PEER, Row, Table, peer

from cosmos_actor.bus import decode
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings

MEET_S = 60.0
PINNED_BYTES = 2 << 30
"""Enough for its rate; torch rounds pinned memory up to a power of two, and a host takes a second for some GB of it."""


def bare_broadcast(table: Table, rounds: int, backend: str, nbytes: int, bucket_bytes: int, devices: tuple[str, str]
                   ) -> Row:
    """torch.distributed's own, of buckets of `bucket_bytes`; set up apart from the clock."""
    import torch

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    giver = subprocess.Popen([sys.executable, str(PEER), "broadcast", "--backend", backend, "--port", str(port),
                              "--rounds", str(rounds), "--nbytes", str(nbytes), "--bucket-bytes", str(bucket_bytes),
                              "--device", devices[0]])
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=1,
                                         timeout=timedelta(seconds=MEET_S))
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8, device=devices[1])

    def run() -> None:
        for _ in range(0, nbytes, bucket_bytes):
            torch.distributed.broadcast(buffer, 0)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier()

    seconds = table.best(run)[0]
    torch.distributed.destroy_process_group()
    giver.wait(30)
    sent = -(-nbytes // bucket_bytes) * bucket_bytes
    return table.add(backend, f"torch.distributed.broadcast, {bucket_bytes // MIB} MiB", sent, seconds)


def flats(table: Table, way: str, transport: Any, said: dict[str, Any], ceiling: Row) -> None:
    """From the publisher's flat into one here: the bytes alone, and verified."""
    from cosmos_actor.weight_plane.device_pull import DevicePull

    manifest = decode(base64.b64decode(said["manifest"]), [])
    pull = DevicePull(lambda ref: transport)
    sent = sum(ref.nbytes for ref in manifest.buckets)
    loop = asyncio.Runner()  # an actor has one that is there already

    def verified() -> None:
        loop_time = time.monotonic() + DEADLINE_S
        loop.run(pull.pull(transport, manifest, loop_time, DEADLINE_S))

    begun = time.perf_counter()
    verified()  # makes the flat, the connection, the group or the mapping, and the kernel
    print(f"{way:10} the first took {time.perf_counter() - begun:.2f} s", flush=True)
    targets = pull._flat.buffers  # type: ignore[union-attr]

    def fetch() -> None:
        async def run() -> None:
            await asyncio.gather(*(transport.fetch_into(ref, target, deadline_s=DEADLINE_S)
                                   for ref, target in zip(manifest.buckets, targets, strict=True)))

        loop.run(run())

    seconds = table.best(fetch, verified)
    table.add(way, f"from flat to flat, {len(manifest.buckets)} buckets", sent, seconds[0], ceiling)
    table.add(way, "the same, every tensor verified", sent, seconds[1], ceiling)
    loop.close()


def pair(table: Table, model: str, rounds: int, backend: str, devices: tuple[str, str]) -> None:
    from cosmos_actor.weight_plane.transports.paired import PIECE_BYTES as BROADCAST_BYTES
    from cosmos_actor.weight_plane.transports.paired import PairTransport

    nbytes = nbytes_of(model)
    ceiling = bare_broadcast(table, rounds, backend, nbytes, min(nbytes, BROADCAST_BYTES), devices)
    with peer("flat", "--model", model, "--device", devices[0]) as said:
        transport = PairTransport(BulkSettings(), backend, devices[1])
        flats(table, backend, transport, said, ceiling)
        transport.close()


def nbytes_of(model: str) -> int:
    return 2 * sum(int(np.prod(shape)) for shape in shapes(model).values())


def gloo(table: Table, model: str, rounds: int) -> None:
    pair(table, model, rounds, "gloo", ("cpu", "cpu"))


def mapped(table: Table, model: str, device: str = "cpu") -> None:
    """Out of another process's memory on one device, against a copy within it."""
    import torch

    from cosmos_actor.weight_plane.transports.mapped import MappedTransport

    way = "mapped" if device == "cpu" else "cuda_ipc"
    source = torch.ones(nbytes_of(model), dtype=torch.uint8, device=device)
    ceiling = table.against(way, source.nbytes, (f"copy, {device}", copied(torch.empty_like(source), source)))
    del source
    with peer("flat", "--model", model, "--device", device) as said:
        transport = MappedTransport(BulkSettings(), device)
        flats(table, way, transport, said, ceiling)
        transport.close()


def copied(into: Any, out_of: Any) -> Callable[[], None]:
    import torch

    def run() -> None:
        into.copy_(out_of, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def on_gpus() -> str:
    """The parts for what is here. No GPU is taken for the answer."""
    import torch

    count = torch.cuda.device_count()
    print(f"gpu        {count or 'none'} here", flush=True)
    return "copies,cuda_ipc,nccl" if count > 1 else "copies,cuda_ipc" if count else ""


def nccl(table: Table, model: str, rounds: int) -> None:
    """The group of two over NCCL."""
    import torch

    torch.cuda.set_device(1)
    pair(table, model, rounds, "nccl", ("cuda:0", "cuda:1"))


def copies(table: Table, model: str) -> None:
    """Copies and sums of one GPU's memory."""
    import torch

    from cosmos_actor.weight_plane.device_digest import kernel_of, sum_eagerly
    from cosmos_actor.weight_plane.digest import BLOCK_BYTES, BLOCK_WORDS, LANES, keys

    logging.basicConfig(level=logging.INFO)  # where the kernel is not used it says why
    nbytes = nbytes_of(model)
    device = torch.device("cuda", 0)
    blocks = nbytes // BLOCK_BYTES
    words = torch.ones((blocks, BLOCK_WORDS), dtype=torch.int32, device=device)
    target, lanes = torch.empty_like(words), torch.from_numpy(keys().copy()).to(device)
    sums = torch.zeros((blocks, LANES), dtype=torch.int64, device=device)

    def summed(kernel: Any) -> Callable[[], None]:
        def run() -> None:
            kernel(words, lanes, sums)
            torch.cuda.synchronize()

        return run

    kernel = kernel_of(device)
    lines = [("sums of blocks, torch", summed(sum_eagerly))]
    lines += [("sums of blocks, Triton", summed(kernel))] if kernel else []
    table.against("gpu", words.nbytes, ("device copy", copied(target, words)), *lines)
    through_the_host(table, model, device)


def through_the_host(table: Table, model: str, device: Any) -> None:
    """The trainer's half and the engine's of a version that goes through the host's memory."""
    import torch

    from cosmos_actor.roles.to_device import THREADS, copy_to_device
    from cosmos_actor.trainer.snapshots import Snapshots

    weights: dict[str, Any] = {}
    for name, shape in shapes(model).items():
        tensor = torch.ones(shape, dtype=torch.bfloat16, device=device)
        if sum(one.nbytes for one in weights.values()) + tensor.nbytes <= PINNED_BYTES:
            weights[name] = tensor
    nbytes = sum(one.nbytes for one in weights.values())
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    plain, snapshots = torch.empty_like(pinned, device=device), Snapshots()
    sources = [torch.ones(one.shape, dtype=one.dtype) for one in weights.values()]

    def snapshot() -> None:
        taken = snapshots.take(weights)
        taken.arrays()
        taken.release()

    table.against("host", nbytes, ("device to pinned host", copied(pinned, plain)),
                  (f"a snapshot of {len(weights)} tensors", snapshot))
    table.against("host", nbytes, ("pinned host to device", copied(plain, pinned)),
                  (f"{len(weights)} tensors of the host, {THREADS} threads",
                   lambda: copy_to_device(sources, list(weights.values()))))
