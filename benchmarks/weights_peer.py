"""The other process of `weights.py`: publishes a model, or is the bare end of a wire for its ceiling.

Says in one line of JSON where it is to be found, works until its standard input ends, and then ends too.
"""

from __future__ import annotations

import argparse
import base64
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from cosmos_actor.bus import Identity, KeyRing, encode, new_incarnation
from cosmos_actor.bus.bulk.server import BulkServer
from cosmos_actor.bus.bulk.settings import MIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.transports.serving import ServedStore
from cosmos_actor.weight_plane.version import Version

PIECE_BYTES = 4 * MIB
"""Of the bare wires: that of the raw streams and of the bulk plane's."""
QWEN3 = {
    "tiny": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head": 64, "inner": 2048, "vocabulary": 65536,
             "tied": True},
    "0.6b": {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head": 128, "inner": 3072,
             "vocabulary": 151936, "tied": True},
    "8b": {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head": 128, "inner": 12288,
           "vocabulary": 151936, "tied": False},
}


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Qwen3 of this size, as Hugging Face names it."""
    has = QWEN3[size]
    hidden, inner, queries, keys = (has["hidden"], has["inner"], has["heads"] * has["head"],
                                    has["kv_heads"] * has["head"])
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (has["vocabulary"], hidden)}
    for number in range(has["layers"]):
        layer = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (has["head"],), "self_attn.k_norm": (has["head"],),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }
        found.update({f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()})
    found["model.norm.weight"] = (hidden,)
    if not has["tied"]:
        found["lm_head.weight"] = (has["vocabulary"], hidden)
    return found


def a_model(size: str) -> dict[str, np.ndarray]:
    """bfloat16 (as uint16) random weights of the real shapes; the random bits repeat every 32 MiB."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, 16 * MIB, np.uint16)
    return {name: np.resize(bits, shape) for name, shape in shapes(size).items()}


def publish(model: str, keys: KeyRing | None) -> tuple[dict[str, Any], Any]:
    """A version on a store that is served by ZeroMQ and by raw streams."""
    weights = a_model(model)
    nbytes = sum(array.nbytes for array in weights.values())
    store = BulkStore(Identity("benchmark", "policy", "policy-0", new_incarnation()),
                      BulkSettings(budget_bytes=nbytes + nbytes // 8 + 64 * MIB, encrypt=keys is not None))
    server = BulkServer(store, keys)
    served = ServedStore(store)
    address = server.start("tcp://127.0.0.1:0")
    manifest = WeightPublisher(served).publish(Version("benchmark", 0, 0), weights)
    return {"manifest": base64.b64encode(encode(manifest)[0]).decode(), "tcp": address}, (server, served, store)


def publish_on(model: str, device: str) -> tuple[dict[str, Any], Any]:
    """A version in the memory of `device`, served by groups of two and by handles."""
    import torch

    from cosmos_actor.weight_plane.device_publisher import DevicePublisher
    from cosmos_actor.weight_plane.flat_pool import FlatPool
    from cosmos_actor.weight_plane.transports.flat_giving import FlatServer
    from cosmos_actor.weight_plane.transports.handles import shareable

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    pool = FlatPool(torch.device(device), allocate=shareable)
    server = FlatServer(Identity("benchmark", "policy", "policy-0", new_incarnation()), pool, lambda: "127.0.0.1",
                        device)
    hold = pool.take({name: ("bfloat16", shape) for name, shape in shapes(model).items()})
    for tensor in hold.flat.tensors().values():
        tensor.normal_()
    manifest = DevicePublisher(server, pool).publish(Version("benchmark", 0, 0), hold.flat.tensors())
    return {"manifest": base64.b64encode(encode(manifest)[0]).decode()}, (server, hold)


def bare_tcp() -> tuple[dict[str, Any], Any]:
    """Sends as many bytes over a connection as the 8 that come over it say."""
    payload = np.resize(np.arange(1 << 20, dtype=np.uint8), PIECE_BYTES).data
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(made: socket.socket) -> None:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(asked := made.recv(8, socket.MSG_WAITALL)) == 8:
            left = int.from_bytes(asked, "little")
            while left:
                made.sendall(payload[: min(left, PIECE_BYTES)])
                left -= min(left, PIECE_BYTES)

    def accept() -> None:
        while True:
            threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return {"port": listener.getsockname()[1]}, listener


def bare_zmq(curve: bool) -> tuple[dict[str, Any], Any]:
    """Sends messages of PIECE_BYTES, as many as it is asked for."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    public, secret = zmq.curve_keypair()
    if curve:
        router.curve_server, router.curve_secretkey, router.curve_publickey = True, secret, public
    router.sndhwm = 64
    port = router.bind_to_random_port("tcp://127.0.0.1")
    payload = bytes(PIECE_BYTES)

    def serve() -> None:
        while True:
            peer, count = router.recv_multipart()
            for _ in range(int(count)):
                router.send_multipart([peer, payload], copy=False)

    threading.Thread(target=serve, daemon=True).start()
    return {"port": port, "key": public.decode()}, context


def broadcast(backend: str, port: int, rounds: int, nbytes: int, bucket_bytes: int, device: str) -> None:
    """The bare ceiling of a group: torch.distributed's own broadcast of the same number of bytes, `rounds` times."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0)
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8, device=device)
    for _ in range(rounds + 1):
        for _ in range(0, nbytes, bucket_bytes):
            torch.distributed.broadcast(buffer, 0)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("what", choices=["publish", "flat", "tcp", "zmq", "curve", "broadcast"])
    options.add_argument("--model", default="tiny")
    options.add_argument("--key", type=Path)
    options.add_argument("--device", default="")
    options.add_argument("--backend", default="gloo")
    for name in ("port", "rounds", "nbytes", "bucket-bytes"):
        options.add_argument(f"--{name}", type=int, default=0)
    chosen = options.parse_args()
    if chosen.what == "broadcast":
        broadcast(chosen.backend, chosen.port, chosen.rounds, chosen.nbytes, chosen.bucket_bytes, chosen.device)
        return
    if chosen.what == "publish":
        said, kept = publish(chosen.model, None if chosen.key is None else KeyRing.load(chosen.key))
    elif chosen.what == "flat":
        said, kept = publish_on(chosen.model, chosen.device)
    elif chosen.what == "tcp":
        said, kept = bare_tcp()
    else:
        said, kept = bare_zmq(chosen.what == "curve")
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    main()
    import os

    os._exit(0)  # threads of the bare wires wait for ever
