"""The Ray side of `benchmarks/bus.py`: run by an interpreter that has ray, prints one JSON object."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import ray


@ray.remote(num_cpus=1)
class Policy:
    def step(self, observation: np.ndarray) -> np.ndarray:
        return ACTION

    def note(self, number: int, text: str) -> None:
        return None


ACTION = np.zeros(7, np.float32)


def main(rounds: int, calls: int, blocks: int, block: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    policy = Policy.remote()
    observation = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    for _ in range(200):
        ray.get(policy.step.remote(observation))
    trips = [timed(lambda: ray.get(policy.step.remote(observation))) for _ in range(rounds * calls)]
    one_way = [timed(lambda: notes(policy, block)) / block for _ in range(blocks)]
    print(json.dumps({"version": ray.__version__, "round_trip_s": trips, "one_way_s": one_way}))
    ray.shutdown()


def notes(policy, count: int) -> None:
    ray.get([policy.note.remote(number, "hello") for number in range(count)])


def timed(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
