"""Run in vLLM's environment: what its engine says of models that transformers has too. Prints a line of JSON.

    vllm_engine.py MODEL swaps | truncated | bfloat16 | float16 | room
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch

from cosmos_actor.roles import vllm_packed
from cosmos_actor.roles.engine import Completion, EngineError, GenerateItem
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.vllm_engine import VllmEngine
from cosmos_actor.roles.vllm_start import Start
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import skeleton
from cosmos_actor.weight_plane.digest import weights_digest

STOP, NEW, COUNT = 2, 12, 48
PROMPTS = ([1, 4, 5], [1, 9], [1, 7, 8, 11, 12, 3])


def make_model(name: str, seed: int) -> Any:
    """With weights of its own for `seed`: large enough that another version is another distribution."""
    model = skeleton(name).to_empty(device="cpu")
    like = type(model)(model.config).eval()
    random = torch.Generator().manual_seed(seed)
    for tensor in like.parameters():
        tensor.data = torch.randn(tensor.shape, generator=random) * (0.3 if tensor.ndim > 1 else 1.0)
    return like.requires_grad_(False)


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return host_copies(named_tensors(model).items())


def items() -> list[GenerateItem]:
    return [GenerateItem(np.array(PROMPTS[i % 3], np.int32), seed=i // 3, sample=i) for i in range(COUNT)]


def settings(**fields: Any) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": NEW, **fields})


def off(model: Any, answers: list[Completion], temperature: float) -> float:
    """The largest difference of a log-prob from transformers', in nats."""
    worst = 0.0
    for item, answer in zip(items(), answers, strict=True):
        sequence = torch.tensor([[*item.prompt.tolist(), *answer.tokens.tolist()]])
        table = torch.log_softmax(model(input_ids=sequence).logits[0].double() / temperature, dim=-1)
        rows = table[len(item.prompt) - 1 : -1]
        right = rows.gather(1, torch.tensor(answer.tokens).long()[:, None])[:, 0]
        worst = max(worst, float((right - torch.tensor(answer.logprobs)).abs().max()))
    return worst


def same(one: list[Completion], other: list[Completion]) -> bool:
    return all(a.tokens.tobytes() == b.tokens.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
               and a.finished == b.finished for a, b in zip(one, other, strict=True))


def said(call: Callable[[], Any]) -> str:
    """What was raised, as a line."""
    try:
        call()
    except (EngineError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def offer(engine: Any, weights: dict[str, np.ndarray], version: int) -> str:
    return str(engine.load_weights(weights, version, weights_digest(weights)))


def broken(weights: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    changed, name = dict(weights), next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))
    if kind == "missing":
        del changed[name]
    elif kind == "unknown":
        changed["more.weight"] = weights[name]
    elif kind == "shape":
        changed[name] = weights[name][:, 1:]
    elif kind == "dtype":
        changed[name] = weights[name].astype(np.float64)
    else:
        changed[name] = np.where(weights[name] == weights[name].max(), np.nan, weights[name])
    return changed


def with_small_numbers(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Minus zero, and less than the smallest normal number, in every tensor."""
    changed = {name: np.array(array) for name, array in weights.items()}
    for array in changed.values():
        array.reshape(-1)[:3] = -0.0, 1e-42, -1e-42
    return changed


def refusals(engine: Any, weights: dict[str, np.ndarray], held: int) -> dict[str, str]:
    """What was said of each offer that is not to be taken."""
    kinds = ("missing", "unknown", "shape", "dtype", "finite")
    found = {kind: said(lambda kind=kind: offer(engine, broken(weights, kind), held + 1)) for kind in kinds}
    found["digest"] = said(lambda: engine.load_weights(weights, held + 1, "0" * 64))
    found["stale"] = said(lambda: offer(engine, weights, held))
    return found


def swaps(engine: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"before": said(lambda: engine.generate(items(), settings())), "versions": []}
    for version in (1, 2, 3):
        model = make_model(name, version)
        weights = weights_of(model)
        right = offer(engine, weights, version) == weights_digest(weights)
        answers = engine.generate(items(), settings())
        found["versions"].append({"digest": right, "off": off(model, answers, 1.0)})
    found["refused"] = refusals(engine, weights_of(make_model(name, 9)), 3)
    found["unchanged"] = same(answers, engine.generate(items(), settings())) and engine.held.version == 3
    small = with_small_numbers(weights)
    found["small"] = offer(engine, small, 4) == weights_digest(small)
    return found


def answers_of(engine: Any, name: str) -> dict[str, Any]:
    model = make_model(name, 5)
    offer(engine, weights_of(model), 5)
    batch = engine.generate(items(), settings(temperature=0.8))
    greedy = engine.generate(items(), settings(temperature=0.0))
    counts = engine.statistics()
    return {
        "off": off(model, batch, 0.8), "greedy_off": off(model, greedy, 1.0),
        "greedy": len({(i % 3, answer.tokens.tobytes()) for i, answer in enumerate(greedy)}),
        "again": same(batch, engine.generate(items(), settings(temperature=0.8))),
        "different": len({answer.tokens.tobytes() for answer in batch}),
        "ends": sorted({answer.finished for answer in batch}),
        "right_ends": all(answer.finished == (answer.tokens[-1] == STOP) and STOP not in answer.tokens[:-1]
                          and (answer.finished or len(answer.tokens) == NEW) for answer in batch),
        "too_long": said(lambda: engine.generate(items(), settings(max_new_tokens=60))),
        "no_tokens": said(lambda: engine.generate([GenerateItem(np.zeros(0, np.int32), 0)], settings())),
        "truncated": said(lambda: engine.generate(items(), settings(top_k=2))),
        "counted": [counts["sequences"] % COUNT, counts["swaps"]],
    }


def stale_head(engine: Any, name: str) -> dict[str, Any]:
    """A reload that leaves the output head as it was, which is what vLLM's own does where it is tied."""
    right, vllm_packed.pack_heads = vllm_packed.pack_heads, lambda model: None
    weights = weights_of(make_model(name, 6))
    found = {"said": said(lambda: offer(engine, weights, 6)),
             "then": said(lambda: engine.generate(items(), settings()))}
    vllm_packed.pack_heads = right
    return {**found, "mended": offer(engine, weights, 7) == weights_digest(weights)}


def truncated(engine: Any, name: str) -> dict[str, Any]:
    model = make_model(name, 5)
    offer(engine, weights_of(model), 5)
    found = {kind: off(model, engine.generate(items(), settings(**fields)), 1.0)
             for kind, fields in (("top_k", {"top_k": 2}), ("top_p", {"top_p": 0.5}), ("greedy", {"temperature": 0.0}))}
    return {**found, "tempered": said(lambda: engine.generate(items(), settings(top_k=2, temperature=0.8)))}


def narrow(engine: Any, name: str) -> dict[str, Any]:
    weights = weights_of(make_model(name, 1).to(engine._skeleton.dtype))
    right = offer(engine, weights, 1) == weights_digest(weights)
    tokens = [len(answer.tokens) for answer in engine.generate(items(), settings())]
    return {"dtype": sorted({array.dtype.name for array in weights.values()}), "digest": right, "shortest": min(tokens)}


def room(engine: Any, name: str) -> dict[str, Any]:
    """A prompt that the model has positions for, and the cache no room."""
    offer(engine, weights_of(make_model(name, 1)), 1)
    prompt = GenerateItem(np.ones(150_000, np.int32), 0)
    return {"said": said(lambda: engine.generate([prompt], settings()))}


def main(name: str, what: str) -> dict[str, Any]:
    engine = VllmEngine(name, stop_ids=(STOP,), wanted=Start(
        sequences=COUNT, dtype=what if what.endswith("float16") else "float32",
        logprobs_mode="raw_logprobs" if what == "truncated" else "processed_logprobs"))
    processes = [child.name() for child in psutil.Process().children(recursive=True)]
    if what == "swaps":
        found = {"swaps": swaps(engine, name), "answers": answers_of(engine, name), "head": stale_head(engine, name)}
    else:
        found = {"truncated": truncated, "bfloat16": narrow, "float16": narrow, "room": room}[what](engine, name)
    return {"processes": processes, **found}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
