"""Run in vLLM's environment: new weights in the middle of its answers, in each of its ways. Prints a line of JSON.

    vllm_in_flight.py MODEL
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from cosmos_actor.roles.engine import GenerateItem
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.vllm_engine import VllmEngine
from cosmos_actor.roles.vllm_start import Start
from tests.project.programs.vllm_engine import STOP, make_model, said
from tests.roles.in_flight import COUNT, LONG, NEW, items, mixed, off, offer, three_versions, versions_of

MODES = ("wait", "keep", "recompute", "abort")
TEMPERATURE = 0.8


def in_mode(engine: Any, models: dict[int, Any], mode: str, first: int) -> dict[str, Any]:
    engine.on_new_weights = mode
    batches = three_versions(engine, models, first, TEMPERATURE)
    versions = [[version - first + 1 for version in some] for some in versions_of(batches)]
    return {"versions": versions, "mixed": mixed(batches), "off": off(models, batches, TEMPERATURE),
            "kept_off": off(models, batches, TEMPERATURE, kept=True)}


def cache(engine: Any, models: dict[int, Any]) -> list[float]:
    """Tokens of prompts that were not read, of one batch and the same again; then of both under new weights."""

    def cached() -> float:
        before = engine.statistics()["cached_tokens"]
        engine.generate(items(), SamplingSettings(max_new_tokens=1))
        return float(engine.statistics()["cached_tokens"] - before)

    engine.on_new_weights = "keep"  # which empties no cache
    held = engine.held.version
    offer(engine, models[held + 1], held + 1)
    first = [cached(), cached()]
    offer(engine, models[held + 2], held + 2)
    return [*first, cached(), cached()]


def dropped(engine: Any) -> dict[str, Any]:
    """A batch that is given up leaves the one beside it alone, and room for the next."""
    settings = SamplingSettings(max_new_tokens=NEW)
    batches = [engine.begin(items(first), settings) for first in (0, 200)]
    engine.step()
    engine.drop(batches[0])
    while engine.in_flight:
        engine.step()
    engine.drop(engine.begin(items(), settings))
    return {"done": [batch.done for batch in batches], "in_flight": engine.in_flight}


def lost(engine: Any, models: dict[int, Any]) -> dict[str, str]:
    """A swap that vLLM fails at, while sequences are in flight."""
    engine.on_new_weights = "recompute"
    engine.begin(items(), SamplingSettings(max_new_tokens=NEW))
    engine.step()
    right, engine._loader = engine._loader, SimpleNamespace(load=lambda *given: 1 / 0)
    held = engine.held.version
    found = {"said": said(lambda: offer(engine, models[held + 1], held + 1)), "in_flight": engine.in_flight,
             "then": said(lambda: engine.generate([GenerateItem(np.array(LONG), 0)], SamplingSettings()))}
    engine._loader = right
    return found


def main(name: str) -> dict[str, Any]:
    engine = VllmEngine(name, stop_ids=(STOP,), joining=True,
                        wanted=Start(sequences=COUNT + 8, logprobs_mode="processed_logprobs"))
    models = {version: make_model(name, version) for version in range(1, 20)}
    found: dict[str, Any] = {mode: in_mode(engine, models, mode, 1 + 3 * at) for at, mode in enumerate(MODES)}
    return {**found, "cached": cache(engine, models), "dropped": dropped(engine), "lost": lost(engine, models)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
