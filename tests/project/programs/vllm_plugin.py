"""Run in vLLM's environment: its weight transfer from the weight plane. Prints a line of JSON, then waits for its end.

    vllm_plugin.py MODEL parallel    two workers, loaded by PluginLoader
    vllm_plugin.py MODEL alone       one worker process, driven as a user of vLLM drives it: start, update, finish
"""

import json
import os
import sys
import tempfile
import threading
from typing import Any

import numpy as np
import psutil
import torch
from vllm_engine import PROMPTS, make_model, weights_of

from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity
from cosmos_actor.roles.engine import EngineError
from cosmos_actor.roles.vllm_plugin import loader as loading
from cosmos_actor.roles.vllm_plugin.taking import manifest_text
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.models import skeleton
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.engine_layout import engine_ranks
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.reshard import Held, Mesh, carry_out, index, plan_copies
from cosmos_actor.weight_plane.version import Version

NEW = 12
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
               "TORCHDYNAMO_DISABLE": "1"}


def start(name: str, **arguments: Any) -> Any:
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    model = skeleton(name)
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True, seed=0,
                   max_num_seqs=16, max_model_len=-1, max_num_batched_tokens=2048, disable_log_stats=True,
                   logprobs_mode="processed_logprobs", **arguments)


def answers(llm: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, sampled tokens, their log-probs)"""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=NEW, temperature=1.0, detokenize=False, logprobs=0, seed=3, ignore_eos=True)
    assert llm.reset_prefix_cache()
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], how, use_tqdm=False)
    ended = [(prompt, output.outputs[0]) for prompt, output in zip(PROMPTS, found, strict=True)]
    return [(list(prompt), list(one.token_ids),
             [table[token].logprob for token, table in zip(one.token_ids, one.logprobs, strict=True)])
            for prompt, one in ended]


def off(model: Any, given: list[tuple[list[int], list[int], list[float]]]) -> float:
    """The largest difference of a log-prob from transformers', in nats."""
    worst = 0.0
    for prompt, tokens, logprobs in given:
        table = torch.log_softmax(model(input_ids=torch.tensor([prompt + tokens])).logits[0].double(), dim=-1)
        right = table[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float((right - torch.tensor(logprobs)).abs().max()))
    return worst


def read_parameters(worker: Any) -> dict[str, np.ndarray]:
    """What a worker computes with, by the names of its own parameters."""
    from cosmos_actor.roles.vllm_weights import parameter_of

    model = worker.get_model()
    with torch.inference_mode():
        return {name: np.array(parameter_of(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]))
                for name, _ in model.named_parameters()}


def by_plan(weights: dict[str, np.ndarray], config: Any, ranks: int) -> list[dict[str, np.ndarray]]:
    """What the planner would bring to each rank from a trainer of two groups of three."""
    mesh, shapes = Mesh(2, 3), {name: array.shape for name, array in weights.items()}
    held = {name: Held(shape, 0) for name, shape in shapes.items()}
    shards = [{name: array[index(held[name].boxes(mesh)[rank % mesh.shards])] for name, array in weights.items()}
              for rank in range(mesh.ranks)]
    destinations = engine_ranks(shapes, ranks, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    made = [{name: np.zeros(shape, np.float32) for name, shape in own.parameters.items()} for own in destinations]
    carry_out(plan_copies(held, mesh, destinations), shards, made)
    return made


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return all(sorted(a) == sorted(b) and all(np.array_equal(a[name], b[name]) for name in a)
               for a, b in zip(one, other, strict=True))


def tensors(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


def mapped_names() -> list[str]:
    """Of shared memory that this process or a child of it maps, and that can still be found."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    maps = {line.split()[-1] for process in family for line in open(f"/proc/{process.pid}/maps")
            if "/psm_" in line or "cpushm" in line}
    return sorted(path for path in maps if os.path.exists(path))


class Corrupting(BulkStore):
    """Changes one byte of the last array that it is given, after its digest was taken."""

    def try_put(self, array: Any, **how: Any) -> Any:
        ref = super().try_put(array, **how)
        flip(self, ref)
        return ref


def flip(store: Any, ref: Any) -> None:
    block = store._arena.block(ref.offset, ref.nbytes)
    block[ref.nbytes // 2] ^= 1


def parallel(name: str) -> dict[str, Any]:
    model = skeleton(name)
    shapes = {tensor: tuple(value.shape) for tensor, value in named_tensors(model).items()}
    llm = start(name, **loading.engine_arguments(2))
    loader = loading.PluginLoader(llm.collective_rpc, llm.llm_engine.set_weight_version, shapes)
    found: dict[str, Any] = {"off": [], "names": mapped_names()}
    for version in (1, 2):
        trained = make_model(name, version)
        weights = weights_of(trained)
        found["digest"] = loader.load(tensors(weights), version, weights_digest(weights)) == weights_digest(weights)
        found["read_back"] = loader.read_back() == weights_digest(weights)
        given = answers(llm)
        found["off"].append(off(trained, given))
    ours = llm.collective_rpc(read_parameters)

    honest, loading.BulkStore = loading.BulkStore, Corrupting
    other = weights_of(make_model(name, 9))
    try:
        loader.load(tensors(other), 3, weights_digest(other))
    except EngineError as error:
        found["corrupt"] = f"{type(error).__name__}: {error}"
    loading.BulkStore = honest
    found["still"] = llm.get_weight_version() == "2" and answers(llm) == given
    loader.load(tensors(other), 3, weights_digest(other))
    found["then"] = llm.get_weight_version()

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(tensors(weights).items())})
    theirs = llm.collective_rpc(read_parameters)
    found["loaders"], found["plan"] = same(ours, theirs), same(by_plan(weights, model.config, 2), theirs)
    return found


def alone(name: str) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    registered = "cosmos" in WeightTransferEngineFactory._registry
    llm = start(name, distributed_executor_backend="mp", weight_transfer_config=WeightTransferConfig(backend="cosmos"),
                worker_extension_cls="cosmos_actor.roles.vllm_plugin.worker.Extension")
    store = BulkStore(Identity("a-run", "policy", "policy-0", "0" * 32), BulkSettings(budget_bytes=16 << 20))
    publisher = WeightPublisher(store, keep=1)
    llm.init_weight_transfer_engine({"init_info": {"run_id": "a-run"}})
    found: dict[str, Any] = {"registered": registered, "off": [], "versions": [llm.get_weight_version()]}

    def offer(step: int, spoil: bool = False) -> Any:
        trained = make_model(name, step)
        manifest = publisher.publish(Version("a-run", 0, step), weights_of(trained))
        if spoil:
            flip(store, manifest.buckets[0])
        llm.start_weight_update()
        llm.update_weights({"update_info": {"manifest": manifest_text(manifest)}})
        found["versions"].append(llm.get_weight_version())
        llm.finish_weight_update(weight_version=str(manifest.version))
        found["versions"].append(llm.get_weight_version())
        return trained

    trained = offer(1)
    given = answers(llm)
    found["off"].append(off(trained, given))
    try:
        offer(2, spoil=True)
    except RuntimeError as error:
        found["corrupt"] = str(error)
    found["still"] = llm.get_weight_version() == "0.1" and answers(llm) == given
    found["off"].append(off(offer(3), answers(llm)))
    return found


if __name__ == "__main__":
    said = {"parallel": parallel, "alone": alone}[sys.argv[2]](sys.argv[1])
    said["processes"] = [child.pid for child in psutil.Process().children(recursive=True)]
    print(json.dumps(said), flush=True)
    threading.Event().wait()
