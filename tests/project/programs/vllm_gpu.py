"""Run in an environment with vLLM's GPU build, on a GPU: what the engine says of itself there, beside transformers.

    vllm_gpu.py MODEL swaps | eager | sleep | adapter | fp8 | parallel [cpu]

Prints each figure as it comes, and at the end all in a line of JSON, with `wrong`, a line for each promise that was not
kept. Exit code 1 when there is any. It ends after $COSMOS_CASE_S, 240 unless set, with the stacks of its threads.
cpu: so much of it as vLLM's CPU build can do, to see that this program is right. All of it: `vllm_gpu_all.py`.
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cosmos_actor.roles.engine import GenerateItem, NoWeights, probe
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.vllm_base import Base
from cosmos_actor.roles.vllm_engine import VllmEngine
from cosmos_actor.roles.vllm_start import Start
from cosmos_actor.trainer.adapter import BASE_DIGEST
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.settings import LoraSettings, TrainerSettings
from cosmos_actor.weight_plane.flat import digest_offered
from tests.project.programs.gpu_models import Answers, Versions, with_adapter
from tests.project.programs.vllm_engine import said

CLOSE_MOST, CLOSE_MEAN = 1.5, 0.15
"""nats: bfloat16 in all layers, and logits rounded to it, against float32."""
FAR_MEAN = 1.0
"""nats: of the log-probs of another version."""
ROUNDED_MEAN = 1.0
"""nats: weights and activations rounded to e4m3."""
STOP, NEW, SEQUENCES, SPEED_NEW, THREADS = 2, 24, 256, 128, 4
LORA = LoraSettings(rank=8, alpha=16.0)
DEVICE = ["cuda"]
CASE_S = float(os.environ.get("COSMOS_CASE_S", "240"))
wrong: list[str] = []
started: list["Case"] = []


class Told(dict[str, Any]):
    """Says what it is given at once: a case may not come to its end."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(f"  {name}: {json.dumps(value)}", flush=True)


def expect(kept: bool, line: str) -> None:
    if not kept:
        wrong.append(line)
        print(f"  WRONG: {line}", flush=True)


def stage(what: Callable[[], None]) -> None:
    """What fails in it is told, and the next one begins all the same."""
    try:
        what()
    except Exception as error:  # of any kind: the others are worth as much
        traceback.print_exc()
        expect(False, f"{type(error).__name__}: {error}")


def items(count: int, vocabulary: int, first: int = 0) -> list[GenerateItem]:
    random = np.random.default_rng(first)
    return [GenerateItem(random.integers(3, vocabulary, 5 + number % 7).astype(np.int32), seed=first, sample=number)
            for number in range(count)]


class Case:
    """An engine on a GPU and the versions that it is given."""

    def __init__(self, name: str, **wanted: Any) -> None:
        begun = time.perf_counter()
        adapted = wanted.pop("adapted", None)
        self.engine = VllmEngine(
            name, stop_ids=(STOP,), joining=True, adapted=adapted,
            wanted=Start(**{"dtype": "bfloat16", "logprobs_mode": "processed_logprobs", "sequences": SEQUENCES,
                            "device": DEVICE[0], "gpu_memory": 0.3, "threads": THREADS, **wanted}))
        self.figures = Told()
        self.figures["start_s"] = time.perf_counter() - begun
        started.append(self)
        self.versions = Versions(name, DEVICE[0])
        self.vocabulary = self.engine._skeleton.config.vocab_size

    def offer(self, tensors: Any, version: int) -> str:
        return str(self.engine.load_weights(tensors, version, digest_offered(tensors)))

    def load(self, number: int, *, awake: bool = True) -> dict[str, torch.Tensor]:
        """A version as it is pulled, and its weights. awake: it can prove that it computes."""
        arrays = self.versions.arrays(number)
        offered = digest_offered(arrays)
        begun = time.perf_counter()
        digest = self.engine.load_weights(arrays, number, offered)
        self.figures["load_from_host_s"] = time.perf_counter() - begun
        expect(digest == offered == self.engine.read_back(), f"version {number}: another digest")
        if awake:
            probe(self.engine)
        return self.versions.tensors(number)

    def answers(self, count: int = 24, temperature: float = 1.0, first: int = 0) -> Answers:
        batch = items(count, self.vocabulary, first)
        return list(zip(batch, self.engine.generate(batch, how(temperature)), strict=True))

    def check(self, what: str, tensors: Any, answers: Answers, temperature: float = 1.0,
              only: int | None = None) -> None:
        off = self.versions.off(tensors, answers, temperature, only)
        self.figures[f"off/{what}"] = off
        expect(off["max"] < CLOSE_MOST and off["mean"] < CLOSE_MEAN, f"{what}: {off} nats from transformers")

    def speed(self) -> None:
        if DEVICE[0] == "cpu":
            return
        batch = items(SEQUENCES, self.vocabulary, 77)
        settings = SamplingSettings(max_new_tokens=SPEED_NEW, stop_ids=(0,))
        self.engine.generate(batch, settings)
        settle()
        begun = time.perf_counter()
        answers = self.engine.generate(batch, settings)
        tokens = sum(len(answer.tokens) for answer in answers)
        self.figures["tokens_per_s"] = tokens / (time.perf_counter() - begun)


def how(temperature: float = 1.0, new: int = NEW) -> SamplingSettings:
    return SamplingSettings(max_new_tokens=new, temperature=temperature)


def settle() -> None:
    if DEVICE[0] == "cuda":
        torch.cuda.synchronize()


def free_bytes() -> int:
    settle()
    return int(torch.cuda.mem_get_info()[0])


def swaps(name: str, **wanted: Any) -> dict[str, Any]:
    case = Case(name, **wanted)
    expect("NoWeights" in said(lambda: case.answers()), "it answered without weights")
    for part in (versions, refusals, from_the_device, padding, in_flight, spoiled):
        stage(lambda part=part: part(case))  # type: ignore[misc]
    case.load(20)
    case.speed()
    return {**case.figures, "statistics": case.engine.statistics()}


def versions(case: Case) -> None:
    before: Any = None
    for number in (1, 2, 3):
        tensors = case.load(number)
        answers = case.answers(temperature=1.0 if number < 3 else 0.7)
        case.check(f"version {number}", tensors, answers, 1.0 if number < 3 else 0.7)
        if before is not None:
            far = case.versions.off(before, answers)
            case.figures["off/other version"] = far
            expect(far["mean"] > FAR_MEAN, f"version {number} is not told from the one before: {far}")
        before = tensors


def refusals(case: Case) -> None:
    arrays = case.versions.arrays(9)
    first = next(iter(arrays))
    lines = [said(lambda: case.engine.load_weights(arrays, 9, "0" * 64)),
             said(lambda: case.offer({**arrays, first: np.full_like(arrays[first], 0x7FC0)}, 9)),  # not numbers
             said(lambda: case.offer({name: one for name, one in arrays.items() if name != first}, 9))]
    case.figures["refused"] = lines
    expect(lines[0].startswith("WeightsSpoiled") and "not finite" in lines[1] and "missing" in lines[2], str(lines))
    expect(case.engine.held.version == 3, "a refused version took the place of the one before")


def from_the_device(case: Case) -> None:
    near = case.versions.tensors(4, near=True)
    digest = digest_offered(near)
    settle()
    begun = time.perf_counter()
    held = case.engine.load_weights(near, 4, digest)
    case.figures["load_from_device_s"] = time.perf_counter() - begun
    expect(held == digest, "a version from the device has another digest")
    case.check("from the device", near, case.answers(first=4))
    not_finite = {name: tensor * float("nan") if "norm" in name else tensor for name, tensor in near.items()}
    expect("not finite" in said(lambda: case.offer(not_finite, 5)), "not a number was taken from the device")


def padding(case: Case) -> None:
    rest = case.engine._worker(lambda worker: [
        float(module.weight[case.vocabulary :].abs().max()) for path, module in worker.get_model().named_modules()
        if path.endswith("embed_tokens") and len(module.weight) > case.vocabulary])
    case.figures["padding"] = rest
    expect(not any(rest), f"padding of the vocabulary is not zero: {rest}")


def in_flight(case: Case) -> None:
    """Versions 11 and 12 in the middle of answers: each token is of the version that it tells."""
    case.engine.on_new_weights = "recompute"
    tensors = {10: case.load(10)}
    batch = items(16, case.vocabulary, 10)
    under_way = case.engine.begin(batch, how())
    for number in (11, 12):
        for _ in range(6):
            case.engine.step()
        tensors[number] = case.load(number)
    while case.engine.in_flight:
        case.engine.step()
    answers = list(zip(batch, under_way.answers(), strict=True))
    told = sorted({int(version) for _, answer in answers for version in answer.versions})
    expect(told == [10, 11, 12], f"versions in the answers: {told}")
    for number in told:
        case.check(f"in flight {number}", tensors[number], answers, only=number)
    case.engine.on_new_weights = "wait"


def spoiled(case: Case) -> None:
    def change(worker: Any) -> None:
        with torch.inference_mode():
            worker.get_model().get_submodule("model.layers.0.post_attention_layernorm").weight.data[1] += 1

    case.engine._worker(change)
    expect(case.engine.read_back() != case.engine.held.digest, "a changed element was not found")


def sleep(name: str) -> dict[str, Any]:
    case = Case(name, sleeping=True)
    engine = case.engine
    least = 4 << 30 if case.vocabulary > 10_000 else 64 << 20  # a small model's cache is small
    tensors = case.load(1)
    before = case.answers()
    for level in (1, 2, 1):
        awake, begun = free_bytes(), time.perf_counter()
        engine.sleep(level)
        slept, asleep = time.perf_counter() - begun, free_bytes()
        begun = time.perf_counter()
        engine.wake(("weights",))
        some = free_bytes()
        if level == 2:
            expect(said(lambda: case.answers()) != "", "it answered while it slept")
            tensors = case.load(2, awake=False)
            padding(case)
        engine.wake(("kv_cache",))
        case.figures[f"sleep {level}"] = {
            "freed_GiB": (asleep - awake) / 2**30, "weights_GiB": (asleep - some) / 2**30, "sleep_s": slept,
            "wake_s": time.perf_counter() - begun, "left_GiB": (asleep - free_bytes()) / 2**30}
        expect(asleep - awake > least, f"sleep of level {level} freed {asleep - awake} bytes")
        expect(asleep - free_bytes() > least, f"awake again after level {level} it has not its memory")
        expect(engine.read_back() == engine.held.digest, f"after a sleep of level {level}: other weights")
        case.check(f"after sleep {level}", tensors, case.answers())
    expect(len(before) > 0, "no answers")
    engine.sleep(2)
    engine.wake(("weights", "kv_cache"))
    expect(said(lambda: case.answers()).startswith(NoWeights.__name__), "it answered with no version's weights")
    return case.figures


def adapter(name: str) -> dict[str, Any]:
    settings = TrainerSettings(model=name, publish_dtype="bfloat16", lora=LORA)
    case = Case(name, adapted=settings, lora_rank=LORA.rank, lora_targets=LORA.targets)
    base = Base(settings)
    for number in (1, 2):
        random = torch.Generator().manual_seed(number)
        tensors = {key: one if key == BASE_DIGEST else (torch.randn(one.shape, generator=random) * 0.3).bfloat16()
                   for key, one in named_tensors(case.engine._skeleton).items()}
        begun = time.perf_counter()
        digest = case.offer(tensors, number)
        case.figures["load_s"] = time.perf_counter() - begun
        expect(digest == digest_offered(tensors) == case.engine.read_back(), f"adapter {number}: another digest")
        merged = with_adapter(base.tensors, tensors, LORA.alpha / LORA.rank)
        answers = case.answers()
        case.check(f"adapter {number}", merged, answers)
        far = case.versions.off(base.tensors, answers)
        case.figures[f"off/base {number}"] = far
        expect(far["mean"] > 3 * case.figures[f"off/adapter {number}"]["mean"], f"the base alone is as near: {far}")
    case.speed()
    return case.figures


def fp8(name: str) -> dict[str, Any]:
    case = Case(name, quantization="fp8", sleeping=True)
    for number in (1, 2):
        tensors = case.load(number)
        off = case.versions.off(tensors, case.answers())
        case.figures[f"off/fp8 {number}"] = off
        expect(off["mean"] < ROUNDED_MEAN, f"fp8: {off} nats from transformers")
    told = {key: value for key, value in case.engine.statistics().items() if key.startswith("fp8/")}
    expect(bool(told) and all(0.005 < value < 0.07 for value in told.values()), f"distances: {told}")
    case.engine.sleep(2)
    case.engine.wake(("weights",))
    tensors = case.load(3, awake=False)
    case.engine.wake(("kv_cache",))
    off = case.versions.off(tensors, case.answers())
    expect(off["mean"] < ROUNDED_MEAN, f"fp8 after a sleep: {off} nats from transformers")
    case.speed()
    return {**case.figures, "distances": told}


def parallel(name: str) -> dict[str, Any]:
    case = Case(name, tensor_parallel=2)
    for number in (1, 2):
        tensors = case.load(number)
        case.check(f"version {number}", tensors, case.answers())
    case.speed()
    return case.figures


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "swaps": swaps, "eager": lambda name: swaps(name, cuda_graphs=False), "sleep": sleep, "adapter": adapter,
    "fp8": fp8, "parallel": parallel}


def main(name: str, what: str, device: str = "cuda") -> int:
    DEVICE[0] = device
    faulthandler.dump_traceback_later(CASE_S, exit=True)
    try:
        figures = CASES[what](name)
    except Exception as error:  # of any kind: what was found until then took minutes of a GPU
        traceback.print_exc()
        wrong.append(f"{type(error).__name__}: {error}")
        figures = started[-1].figures if started else {}
    print(json.dumps({"case": what, "model": name, **figures, "wrong": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # workers end with it; nothing that vLLM would take down on its way out outlives it
