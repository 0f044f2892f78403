"""All cases of vllm_gpu.py, the most telling first, one at a time on each GPU that is there. No torch in this process.

    vllm_gpu_all.py [--seconds 560] [--case-s 200] [CASE …]

What a case prints comes as it comes, with its name before it; at the end a line for each, also for those that the time
was too short for. Exit code 1 unless all ended well. A CASE is named as in that list, such as `swaps/tiny`.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

TINY = "tiny:qwen3?hidden=128&layers=2&heads=2&kv_heads=1&intermediate=256&vocab=160&positions=512"
"""Its vocabulary is padded."""
QWEN3_06B = "tiny:qwen3?hidden=1024&layers=28&heads=16&kv_heads=8&intermediate=3072&vocab=151936&positions=4096"
"""As Qwen3-0.6B, but for heads of 64."""
MODELS = {"tiny": TINY, "0.6B": QWEN3_06B}
CASES = ("swaps/tiny", "sleep/0.6B", "fp8/tiny", "swaps/0.6B", "adapter/tiny", "eager/tiny", "fp8/0.6B", "sleep/tiny",
         "adapter/0.6B")
TWO_GPUS = ("parallel/tiny", "parallel/0.6B")
LEAST_S = 45.0
"""With less left no case is begun."""
ROOT = Path(__file__).resolve().parents[3]


def gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))


class Round:
    """Cases that are handed out one after the other until the time is over."""

    def __init__(self, until: float, case_s: float) -> None:
        self._until, self._case_s = until, case_s
        self._lock = threading.Lock()
        self.ended: dict[str, str] = {}
        """Case -> what became of it; empty: all was kept."""

    def play(self, cases: Iterator[str], devices: str) -> None:
        for case in cases:
            left = self._until - time.monotonic()
            self.ended[case] = self._case(case, devices, left) if left > LEAST_S else "not begun: no time was left"

    def _case(self, case: str, devices: str, left: float) -> str:
        what, _, model = case.partition("/")
        limit, begun = min(self._case_s, left - 5.0), time.monotonic()
        command = [sys.executable, "-u", "-m", "tests.project.programs.vllm_gpu", MODELS[model], what]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env={**os.environ, "CUDA_VISIBLE_DEVICES": devices, "COSMOS_CASE_S": str(limit)})
        killer = threading.Timer(limit + 4.0, process.kill)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                print(f"[{case}] {line[:1500].rstrip()}", flush=True)
        code = process.wait()
        killer.cancel()
        self._say(case, code, time.monotonic() - begun)
        return "" if code == 0 else f"exit code {code}"

    def _say(self, case: str, code: int, seconds: float) -> None:
        with self._lock:
            print(f"[{case}] exit code {code} after {seconds:.0f} s", flush=True)


def handed_out(cases: queue.SimpleQueue[str]) -> Iterator[str]:
    while True:
        try:
            yield cases.get_nowait()
        except queue.Empty:
            return


def queued(cases: Iterable[str]) -> queue.SimpleQueue[str]:
    made: queue.SimpleQueue[str] = queue.SimpleQueue()
    for case in cases:
        made.put(case)
    return made


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seconds", type=float, default=560.0)
    words.add_argument("--case-s", type=float, default=200.0)
    words.add_argument("cases", nargs="*", metavar="CASE")
    wanted = words.parse_args()
    found = gpus()
    if not found:
        print("vllm_gpu_all: this host has no GPU", flush=True)
        return 1
    cases = wanted.cases or [*CASES, *(TWO_GPUS if len(found) > 1 else ())]
    round_ = Round(time.monotonic() + wanted.seconds, wanted.case_s)
    alone = queued(case for case in cases if case not in TWO_GPUS)
    players = [threading.Thread(target=round_.play, args=(handed_out(alone), gpu)) for gpu in found]
    for player in players:
        player.start()
    for player in players:
        player.join()
    round_.play(handed_out(queued(case for case in cases if case in TWO_GPUS)), ",".join(found[:2]))
    for case, problem in round_.ended.items():
        print(f"{'FAILED' if problem else 'kept  '} {case} {problem}", flush=True)
    return 1 if any(round_.ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
