"""What publishing a version costs the step that follows, against waiting for the whole publication.

    python benchmarks/publish_stall.py [--model NAME] [--tokens N] [--rounds N] [--json FILE]

    waits     copies, digests and puts a version while the next step waits, as without snapshots
    snapshot  what the step pays: a copy into a host buffer that is used again
    behind    digests and puts in a thread while the next step computes, and how long that step then takes

The default model has the sizes of SmolLM2-135M, random weights, float32. A step of --tokens tokens is a small one: the
recipe grpo-smollm2 trains 1,024 sequences, some 60,000 tokens, and its share is smaller by as much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.bus.bulk.settings import GIB, BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.identity import Identity, new_incarnation
from cosmos_actor.trainer.batch import batch_from_examples
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.trainer.settings import SftSettings, TrainerSettings
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.version import Version

SMOLLM2 = ("tiny:qwen3?hidden=576&layers=30&heads=9&kv_heads=3&intermediate=1536&vocab=49152&positions=256")
LENGTH = 64
RECIPE_TOKENS = 64 * 16 * 60
"""Sequences of a step of grpo-smollm2, times prompt and answer."""


def took(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


class Bench:
    """A trainer, a store, and a thread that publishes."""

    def __init__(self, model: str, tokens: int) -> None:
        settings = TrainerSettings(model=model, threads=2, sft=SftSettings(learning_rate=1e-6))
        self.trainer = PolicyTrainer(settings)
        self.gpu = self.trainer.world.device.type == "cuda"
        store = BulkStore(Identity("run", "policy", "policy-0", new_incarnation()), BulkSettings(budget_bytes=4 * GIB))
        self.publisher = WeightPublisher(store)
        self.thread = ThreadPoolExecutor(1)
        self._version = 0
        draw = np.random.default_rng(0)
        rows = [draw.integers(1, 30, LENGTH).tolist() for _ in range(max(1, tokens // LENGTH))]
        self.batch = batch_from_examples([(row[: LENGTH // 2], row[LENGTH // 2:]) for row in rows])

    def step(self) -> float:
        return took(lambda: self.trainer.sft_step(self.batch))[0]

    def publish(self, tensors: Any) -> float:
        self._version += 1
        return took(lambda: self.publisher.publish(Version("run", 0, self._version), tensors))[0]

    def waits(self) -> float:
        return took(lambda: self.publish(self.trainer.weights()))[0]

    def behind(self) -> tuple[float, float, float]:
        """(stall, publication, the step beside it), in seconds."""
        stall, snapshot = took(self.trainer.snapshot)

        def publish() -> float:
            seconds = self.publish(snapshot.arrays())
            snapshot.release()
            return seconds

        publication = self.thread.submit(publish)
        step = self.step()
        return stall, publication.result(), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options.model, options.tokens)
    nbytes = sum(tensor.nbytes for tensor in bench.trainer.weights().values())
    bench.step()
    first = bench.behind()[0]
    bench.behind()  # the second buffer
    median = statistics.median
    waits = median(bench.waits() for _ in range(options.rounds))
    alone = median(bench.step() for _ in range(options.rounds))
    stall, publication, beside = (median(column) for column in zip(*(bench.behind() for _ in range(options.rounds)),
                                                                   strict=True))
    found = {"bytes": nbytes, "tokens": bench.batch.token_count, "gpu": bench.gpu, "waits_s": waits, "step_s": alone,
             "first_snapshot_s": first, "stall_s": stall, "publication_s": publication, "step_beside_s": beside,
             "stall_share": stall / alone, "waits_share": waits / alone,
             "stall_share_of_recipe": stall / (alone * RECIPE_TOKENS / (options.tokens or 1))}
    print(f"{nbytes / 1e6:.0f} MB a version, a step of {options.tokens} tokens takes {alone:.2f} s")
    print(f"waits     {waits * 1e3:8.0f} ms = {100 * waits / alone:6.2f} % of the step")
    print(f"snapshot  {stall * 1e3:8.0f} ms = {100 * stall / alone:6.2f} % of the step (the first, which takes its "
          f"memory, {first * 1e3:.0f} ms)")
    print(f"behind    {publication * 1e3:8.0f} ms, and the step beside it takes {beside:.2f} s")
    print(f"of a step of {RECIPE_TOKENS} tokens the snapshot would be {100 * found['stall_share_of_recipe']:.3f} %")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
