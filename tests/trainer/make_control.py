"""A small trainer for control, an engine beside it, and batches that the engine acted out in a made-up world."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_actor.roles.control_engine import ControlEngine
from cosmos_actor.simulator_bridge.contract import BOX, DISCRETE, ActionSpec, ArraySpec
from cosmos_actor.trainer.control import ControlTrainer, Part
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.weight_plane.digest import weights_digest

DISCRETE_ACTION = ActionSpec(DISCRETE, n=3)
BOX_ACTION = ActionSpec(BOX, shape=(2, 1), low=(-1.0, -1.0), high=(1.0, 0.5))
VECTORS = {"position": ArraySpec("float64", (3,)), "grip": ArraySpec("float32", ())}
IMAGES = {"camera": ArraySpec("uint8", (36, 40, 3)), "depth": ArraySpec("uint8", (36, 40)), **VECTORS}


def settings(network: dict[str, Any] | None = None, **ppo: Any) -> ControlSettings:
    return ControlSettings.model_validate({"network": network or {}, "ppo": ppo})


def make_trainer(chosen: ControlSettings | None = None, action: ActionSpec = DISCRETE_ACTION, *, seed: int = 1,
                 observations: dict[str, ArraySpec] = VECTORS, total: int = 100, cloning: int = 0,
                 part: Part = "joint") -> ControlTrainer:
    return ControlTrainer(chosen or settings(), observations, action, seed=seed, total_updates=total,
                          cloning_updates=cloning, part=part)


def make_engine(trainer: ControlTrainer, version: int = 0) -> ControlEngine:
    """An engine that holds the trainer's present weights."""
    engine = ControlEngine(trainer.settings, trainer.observations, trainer.action)
    weights = trainer.weights()
    engine.load_weights(weights, version, weights_digest(weights))
    return engine


def seen(specs: dict[str, ArraySpec], rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.integers(0, 256, (rows, *spec.shape)).astype(spec.dtype) if spec.dtype in ("uint8", "int32")
            else (draw.normal(size=(rows, *spec.shape)) * 3 + 1).astype(spec.dtype) for name, spec in specs.items()}


def make_batch(engine: ControlEngine, specs: dict[str, ArraySpec] = VECTORS, *, steps: int = 64, seed: int = 0
               ) -> dict[str, Any]:
    """Rewards are highest for the action 0 and for box actions near (0.5, 0.5)."""
    observations = seen(specs, steps, seed)
    actions, logprobs, values = engine.act(observations, engine.noise(np.random.default_rng(seed), steps))
    boundary = np.arange(steps) % 8 == 7
    wide = actions.reshape(steps, -1).astype(np.float32)
    rewards = -np.abs(wide - (0.0 if actions.dtype == np.int64 else 0.5)).sum(axis=1)
    return {"observations": observations, "actions": actions, "logprobs": logprobs, "values": values,
            "bootstrap": np.where(boundary, values, 0.0).astype(np.float32), "boundary": boundary, "rewards": rewards}
