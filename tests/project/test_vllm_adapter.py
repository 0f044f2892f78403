"""vLLM with a base that it loads itself and adapters in memory: its log-probs are those of peft on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_actor.trainer.adapter import load_served_model
from cosmos_actor.trainer.model_weights import load_whole, weights_digest_of
from tests.project.programs.adapters import LORA, adapter, trained
from tests.project.test_vllm import CLOSE, QWEN3, python, told  # noqa: F401

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2400), pytest.mark.components]
FAR = 0.02
"""nats: the base alone, or another version, is further from an adapter's log-probs than this."""


def off(model: Any, answers: list[tuple[list[int], list[int], list[float]]]) -> float:
    """The largest difference of a log-prob from peft's, in nats."""
    worst = 0.0
    with torch.inference_mode():
        for prompt, tokens, logprobs in answers:
            table = torch.log_softmax(model(input_ids=torch.tensor([prompt + tokens])).logits[0].double(), dim=-1)
            right = table[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            worst = max(worst, float((right - torch.tensor(logprobs)).abs().max()))
    return worst


def test_each_version_of_an_adapter_is_what_peft_computes_with_and_no_other_is_taken(
        python: Path, tmp_path: Path) -> None:  # noqa: F811
    found = told(python, tmp_path, QWEN3, program="vllm_adapter.py")
    model = load_served_model(trained(QWEN3), "cpu")
    assert off(model, found["versions"][0]["answers"]) > FAR  # an adapter of no steps, which is the base
    for version, one in enumerate(found["versions"], start=1):
        load_whole(model, adapter(QWEN3, version))
        assert one["digest"] == one["read"] == weights_digest_of(model)
        assert off(model, one["answers"]) < CLOSE
        assert off(model, found["versions"][2 - version]["answers"]) > FAR

    assert found["before"].startswith("NoWeights")
    assert all(line.startswith("WeightsRefused: version 3") for line in found["refused"].values())
    assert "the adapter is for a base with digest" in found["refused"]["base"]
    assert "lora_B.weight has numbers that are not finite" in found["refused"]["finite"]
    assert found["unchanged"] and found["spoiled"] and found["again"]
    assert found["sleep"].startswith("EngineError: this engine can not sleep")
    assert LORA.alpha / LORA.rank != 1.0
