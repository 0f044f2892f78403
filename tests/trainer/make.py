"""A tiny trainer, an engine beside it, and groups that the engine sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.roles.engine import GenerateItem
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.trainer.adapter import load_served_model
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.trainer.settings import GrpoSettings, OptimizerSettings, SftSettings, TrainerSettings

MODEL = "tiny:qwen3?hidden=32&layers=2&heads=2&kv_heads=1&intermediate=64&vocab=32&positions=64"
EXAMPLES = [([1, 5, 6], [7, 2]), ([1, 8], [9, 10, 2]), ([1, 3, 4, 5], [2]), ([1, 6, 6], [11, 2])]


def make_settings(*, lr: float = 1e-2, grpo: dict[str, Any] | None = None, **fields: Any) -> TrainerSettings:
    return TrainerSettings(
        **{
            "model": MODEL,
            "device": "cpu",
            "optimizer": OptimizerSettings(learning_rate=lr, warmup_steps=2),
            "sft": SftSettings(learning_rate=lr),
            "grpo": GrpoSettings(**(grpo or {})),
            **fields,
        }
    )


def make_engine(trainer: PolicyTrainer, version: int = 0) -> TorchEngine:
    """An engine that holds the trainer's present weights; before that, others, but for the base of an adapter."""
    from cosmos_actor.weight_plane.digest import weights_digest

    own = trainer.settings
    whole = own.lora.rank == 0 or own.lora.publish == "merged"
    model = load_served_model(own.model_copy(update={"seed": 99}) if whole else own, "cpu")
    engine = TorchEngine(model, stop_ids=(2,), pad_id=0)
    weights = trainer.weights()
    engine.load_weights(weights, version, weights_digest(weights))
    return engine


def sample_groups(engine: TorchEngine, *, groups: int = 4, samples: int = 3, temperature: float = 1.0, seed: int = 0,
                  new: int = 6) -> list[TrajectoryGroup]:
    """Groups whose rewards are a function of their tokens."""
    prompts = [np.array([1, *range(3, 3 + 1 + number % 4)], np.int32) for number in range(groups)]
    items = [
        GenerateItem(prompt, seed * 1000 + number, sample)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]
    done = engine.generate(items, SamplingSettings(temperature=temperature, max_new_tokens=new))
    return [
        _group(number, prompts[number], done[number * samples : (number + 1) * samples], engine.held.version)
        for number in range(groups)
    ]


def _group(number: int, prompt: np.ndarray, completions: list[Any], version: int) -> TrajectoryGroup:
    lengths = np.array([len(completion.tokens) for completion in completions], np.int32)
    tokens = np.concatenate([completion.tokens for completion in completions])
    return TrajectoryGroup(
        group_id=f"g{number:06d}", attempt=0, task=None, prompt=prompt, lengths=lengths, tokens=tokens,
        logprobs=np.concatenate([completion.logprobs for completion in completions]),
        versions=np.full(len(tokens), version, np.int32), version_dispatch=version,
        finished=np.array([completion.finished for completion in completions], np.uint8),
        texts=[""] * len(completions),
        rewards=np.array([float(completion.tokens.sum() % 3 == 0) for completion in completions], np.float32),
    )
