"""A whole refresh, from the trainer's weights to an engine that has proved that it holds them, phase by phase.

    python benchmarks/refresh.py [--model tiny|0.6b|8b] [--way mapped|gloo|cuda_ipc|nccl] [--engine torch|vllm]
                                 [--rounds 5] [--json FILE]

    policy process   snapshot    weights into a flat on the policy's device
                     digest      of every tensor, in one pass; the version can be pulled
    both             announce    the manifest, packed, through a pipe, unpacked
    engine process   transfer    from flat to flat
                     verify      the digests of what came
                     offer       the same once more by the engine, before the first tensor is copied
                     swap        into the engine's own tensors
                     read-back   the digest of these

Qwen3's shapes in bfloat16, random weights that change from version to version. `total` is by one clock from before the
snapshot to after the read-back; `offer` and `read-back` are timed once more by themselves, and `swap` is what is left
of the engine's `load_weights`. The bare wire is timed in the same run: a broadcast of as many bytes, or a copy on the
device. Medians; GB are 10^9 bytes. What fails costs what follows it and makes the exit code 1; FILE has all until then.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weights_devices import bare_broadcast, copied, nbytes_of
from weights_peer import QWEN3, shapes
from weights_table import DEADLINE_S, Table

from cosmos_actor.bus import Identity, decode, encode, new_incarnation
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.weight_plane.version import Version

WAYS = {"mapped": ("cpu", "cpu"), "gloo": ("cpu", "cpu"), "cuda_ipc": ("cuda:0", "cuda:0"),
        "nccl": ("cuda:1", "cuda:0")}
"""Where the policy's weights are, and where the engine's: vLLM takes the first GPU that it sees."""
PHASES = ("snapshot", "digest", "announce", "transfer", "verify", "offer", "swap", "read-back")


# -- the policy's process ---------------------------------------------------------------------------------------------


def policy(model: str, device_name: str) -> None:
    """For each line on the standard input: a step that changes the weights, and their publication."""
    import torch

    from cosmos_actor.trainer.device_snapshots import DeviceSnapshots
    from cosmos_actor.weight_plane.device_publisher import DevicePublisher
    from cosmos_actor.weight_plane.flat_pool import FlatPool
    from cosmos_actor.weight_plane.transports.flat_giving import FlatServer
    from cosmos_actor.weight_plane.transports.handles import shareable

    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    weights = {name: torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(0.02)
               for name, shape in shapes(model).items()}
    pool = FlatPool(device, allocate=shareable)
    server = FlatServer(Identity("benchmark", "policy", "policy-0", new_incarnation()), pool, lambda: "127.0.0.1",
                        device_name)
    publisher, snapshots = DevicePublisher(server, pool), DeviceSnapshots(pool)
    for step, _ in enumerate(sys.stdin):
        for tensor in weights.values():
            tensor.add_(0.001)
        wait_for(device)
        begun = time.monotonic()
        publisher.make_room()
        snapshot = snapshots.take(weights)
        tensors = snapshot.arrays()
        taken = time.monotonic()
        manifest = publisher.publish(Version("benchmark", 0, step), tensors)
        published = time.monotonic()
        snapshot.release()
        said = {"begun": begun, "published": published, "snapshot": taken - begun, "digest": published - taken,
                "manifest": base64.b64encode(encode(manifest)[0]).decode()}
        print(json.dumps(said), flush=True)
    server.close()


# -- the engine's -----------------------------------------------------------------------------------------------------


class Timed:
    """A transport that remembers when the last bucket had come."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.device, self.came = transport, transport.device, 0.0
        self.lives, self.close = transport.lives, transport.close

    async def fetch_into(self, ref: Any, target: Any, *, deadline_s: float) -> None:
        await self.transport.fetch_into(ref, target, deadline_s=deadline_s)
        self.came = time.monotonic()


def transport_of(way: str) -> Timed:
    from cosmos_actor.weight_plane.transports.mapped import MappedTransport
    from cosmos_actor.weight_plane.transports.paired import PairTransport

    device, settings = WAYS[way][1], BulkSettings()
    return Timed(PairTransport(settings, way, device) if way in ("gloo", "nccl") else MappedTransport(settings, device))


def configuration(model: str) -> Any:
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    has = QWEN3[model]
    return Qwen3Config(
        hidden_size=has["hidden"], num_hidden_layers=has["layers"], num_attention_heads=has["heads"],
        num_key_value_heads=has["kv_heads"], head_dim=has["head"], intermediate_size=has["inner"],
        vocab_size=has["vocabulary"], tie_word_embeddings=has["tied"], max_position_embeddings=512,
        architectures=["Qwen3ForCausalLM"])


def engine_of(kind: str, model: str, device: str) -> Any:
    """An engine of these shapes with whatever weights."""
    if kind == "vllm":
        from cosmos_actor.roles.vllm_engine import VllmEngine
        from cosmos_actor.roles.vllm_start import Start

        wanted = Start(dtype="bfloat16", logprobs_mode="raw_logprobs", sequences=8, gpu_memory=0.3, cuda_graphs=False,
                       device="cuda" if device.startswith("cuda") else "cpu")
        with tempfile.TemporaryDirectory() as folder:
            configuration(model).save_pretrained(folder)
            return VllmEngine(folder, stop_ids=(0,), wanted=wanted)
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    from cosmos_actor.roles.torch_engine import TorchEngine

    with torch.device("meta"):
        module = Qwen3ForCausalLM(configuration(model)).to(torch.bfloat16)
    module = module.to_empty(device=device)
    module.tie_weights()
    return TorchEngine(module, stop_ids=(0,), pad_id=0, cuda_graphs=False)


def wait_for(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def timed(action: Any) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def refresh(said: dict[str, Any], pull: Any, transport: Timed, engine: Any, loop: asyncio.Runner) -> dict[str, float]:
    """Take one version that the policy has announced. Raises unless the engine holds it."""
    from cosmos_actor.weight_plane.flat import digest_offered

    manifest = decode(base64.b64decode(said["manifest"]), [])
    announced = time.monotonic()
    tensors = loop.run(pull.pull(transport, manifest, announced + DEADLINE_S, DEADLINE_S))
    pulled = time.monotonic()
    reported = engine.load_weights(tensors, manifest.version.ordinal, manifest.digest)
    wait_for(transport.device)
    done = time.monotonic()
    if reported != manifest.digest:
        raise RuntimeError(f"the engine holds {reported[:12]}, published was {manifest.digest[:12]}")
    offer, read_back = timed(lambda: digest_offered(tensors)), timed(engine.read_back)
    return {"snapshot": said["snapshot"], "digest": said["digest"], "announce": announced - said["published"],
            "transfer": transport.came - announced, "verify": pulled - transport.came, "offer": offer,
            "swap": done - pulled - offer - read_back, "read-back": read_back, "total": done - said["begun"]}


def ceiling(way: str, model: str, rounds: int) -> float:
    """Seconds of the bare wire for as many bytes."""
    import torch

    table, nbytes = Table(rounds), nbytes_of(model)
    if way in ("gloo", "nccl"):
        row = bare_broadcast(table, rounds, way, nbytes, min(nbytes, 256 << 20), WAYS[way])
        return row.seconds * nbytes / row.nbytes  # it sends whole pieces
    source = torch.ones(nbytes, dtype=torch.uint8, device=WAYS[way][1])
    return table.against(way, nbytes, ("copy on the device", copied(torch.empty_like(source), source))).seconds


def measured(model: str, way: str, engine_kind: str, rounds: int) -> Iterator[dict[str, float]]:
    """The phases of each refresh, but for the first two, in which both flats and all connections are made."""
    from cosmos_actor.weight_plane.device_pull import DevicePull

    begun = time.monotonic()
    command = [sys.executable, __file__, "--role", "policy", "--model", model, "--device", WAYS[way][0]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    engine, transport = engine_of(engine_kind, model, WAYS[way][1]), transport_of(way)
    pull = DevicePull(lambda ref: transport)
    try:
        with asyncio.Runner() as loop:  # an actor has one that is there already
            for number in range(rounds + 2):
                process.stdin.write("step\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the policy's process ended with {process.wait()}")
                found = refresh(json.loads(line), pull, transport, engine, loop)
                if number > 1:
                    yield found
                else:
                    print(f"refresh {number} was done {time.monotonic() - begun:.1f} s after the start", flush=True)
    finally:
        process.stdin.close()
        transport.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def medians(taken: list[dict[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(one[phase] for one in taken) for phase in (*PHASES, "total")} if taken else {}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", choices=list(QWEN3), default="tiny")
    options.add_argument("--way", choices=list(WAYS), default="mapped")
    options.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path)
    options.add_argument("--role", choices=["engine", "policy"], default="engine", help=argparse.SUPPRESS)
    options.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.role == "policy":
        policy(chosen.model, chosen.device)
        return 0
    if WAYS[chosen.way][1].startswith("cuda"):
        import torch

        torch.cuda.set_device(WAYS[chosen.way][1])
    nbytes = nbytes_of(chosen.model)
    print(f"Qwen3 {chosen.model} in bfloat16, {nbytes / 1e9:.2f} GB, by {chosen.way}, {chosen.engine} engine",
          flush=True)
    taken: list[dict[str, float]] = []
    facts: dict[str, Any] = {"model": chosen.model, "way": chosen.way, "engine": chosen.engine, "nbytes": nbytes,
                             "rounds": taken}

    def keep(**found: Any) -> None:
        facts.update(found)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(facts, indent=1) + "\n")

    failed = False
    try:
        for one in measured(chosen.model, chosen.way, chosen.engine, chosen.rounds):
            taken.append(one)
            keep(median=medians(taken))
    except Exception:
        failed = True
        traceback.print_exc()
    for phase, seconds in medians(taken).items():
        print(f"{phase:10} {seconds * 1e3:10.2f} ms {nbytes / max(seconds, 1e-9) / 1e9:10.2f} GB/s", flush=True)
    try:
        keep(bare_seconds=ceiling(chosen.way, chosen.model, chosen.rounds))
    except Exception:
        failed = True
        traceback.print_exc()
    if taken and "bare_seconds" in facts:
        print(f"transfer is {facts['bare_seconds'] / facts['median']['transfer']:.2f} of the bare wire")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
