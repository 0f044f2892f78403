"""Run in vLLM's environment: adapters alone, each a version, on a base that vLLM loads itself. Prints a line of JSON.

    vllm_adapter.py MODEL
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from adapters import LORA, adapter, trained
from vllm_engine import COUNT, STOP, items, offer, said, same, settings

from cosmos_actor.roles.vllm_adapters import NUMBER
from cosmos_actor.roles.vllm_engine import VllmEngine
from cosmos_actor.roles.vllm_start import Start
from cosmos_actor.trainer.adapter import BASE_DIGEST


def answered(engine: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, tokens, log-probs) of each answer."""
    return [(item.prompt.tolist(), answer.tokens.tolist(), answer.logprobs.tolist())
            for item, answer in zip(items(), engine.generate(items(), settings()), strict=True)]


def refusals(engine: Any, name: str) -> dict[str, str]:
    right = adapter(name, 9)
    some = next(key for key in right if ".lora_B." in key)
    wrong = {
        "base": {**right, BASE_DIGEST: right[BASE_DIGEST] ^ 1},
        "missing": {key: array for key, array in right.items() if key != some},
        "shape": {**right, some: right[some][:, 1:]},
        "finite": {**right, some: np.full_like(right[some], np.inf)}}
    return {kind: said(lambda tensors=tensors: offer(engine, tensors, 3)) for kind, tensors in wrong.items()}


def spoil(worker: Any) -> None:
    """One element of one layer's B, where vLLM has it."""
    manager = worker.model_runner.lora_manager._adapter_manager
    layer = next(layer for name, layer in manager.modules.items() if name.endswith("down_proj"))
    with torch.inference_mode():
        layer.lora_b_stacked[0][manager.lora_index_to_id.index(NUMBER), 0, 1, 1] += 1


def main(name: str) -> dict[str, Any]:
    engine = VllmEngine(name, stop_ids=(STOP,), adapted=trained(name), wanted=Start(
        sequences=COUNT, logprobs_mode="processed_logprobs", lora_rank=LORA.rank, lora_targets=LORA.targets))
    found: dict[str, Any] = {"before": said(lambda: engine.generate(items(), settings())), "versions": []}
    for version in (1, 2):
        tensors = adapter(name, version)
        digest = offer(engine, tensors, version)
        found["versions"].append({"digest": digest, "read": engine.read_back(), "answers": answered(engine)})
    before = engine.generate(items(), settings())
    found["refused"] = refusals(engine, name)
    found["unchanged"] = same(before, engine.generate(items(), settings())) and engine.held.version == 2
    found["sleep"] = said(lambda: engine.sleep(1))
    engine._worker(spoil)
    found["spoiled"] = engine.read_back() not in ("", engine.held.digest)
    found["again"] = offer(engine, adapter(name, 3), 3) == engine.read_back()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
