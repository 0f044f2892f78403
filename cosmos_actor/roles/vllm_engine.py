"""The rollout engine vLLM, in this process: one request a sequence, token ids in and out, on a CPU or a GPU.

vLLM lives in an environment of its own (`rollout.python`); nothing else of the package imports it. Its engine core is
kept in this process, so that what it computes with can be read back, and so that nothing is left of it when the
process is killed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.roles.engine import (
    KV_CACHE,
    WAIT,
    WAKES,
    WEIGHTS,
    AwakeParts,
    Batch,
    Completion,
    EngineError,
    GenerateItem,
    HeldWeights,
    NoWeights,
    OnNewWeights,
    WeightsLost,
    WeightsRefused,
    check_lengths,
    check_may_sleep,
    check_nothing_in_flight,
    generate,
)
from cosmos_actor.roles.engines import vllm_can_not, vllm_logprobs_mode
from cosmos_actor.roles.newer_weights import check_offer, unfit_is_refused
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.vllm_adapters import Adapters, adapter_request
from cosmos_actor.roles.vllm_base import Base, put_adapter
from cosmos_actor.roles.vllm_fp8 import Fp8
from cosmos_actor.roles.vllm_in_place import InPlace
from cosmos_actor.roles.vllm_packed import Loader, Packed
from cosmos_actor.roles.vllm_plugin.loader import PluginLoader
from cosmos_actor.roles.vllm_start import CPU, Start, reason, start
from cosmos_actor.roles.vllm_steps import Flights
from cosmos_actor.roles.vllm_versions import version_setter
from cosmos_actor.roles.vllm_weights import NotFoundInVllm, locate, places
from cosmos_actor.trainer.model_weights import fitting, named_tensors
from cosmos_actor.trainer.models import skeleton, use_threads
from cosmos_actor.trainer.settings import TrainerSettings

NOTHING = HeldWeights(version=-1, digest="")


class VllmEngine:
    """Implements RolloutEngine; see `vllm_steps` for how batches are brought on together.

    Unless they are `joining`, an answer is a function of its batch, the settings and the weights held. It begins
    without weights, and then raises NoWeights; so it does after a swap that vLLM failed at, since nothing is ever
    sampled with half of a version.
    """

    def __init__(self, model: str, *, stop_ids: Sequence[int], wanted: Start, on_new_weights: OnNewWeights = WAIT,
                 joining: bool = False, adapted: TrainerSettings | None = None) -> None:
        """wanted.tensor_parallel: more than 1 puts the model into as many processes, each with a part; see
        `vllm_plugin`. adapted: versions are adapters for the base that these settings name; None: whole models."""
        self.held = NOTHING
        self.on_new_weights = on_new_weights
        self._skeleton = skeleton(model, dtype=wanted.dtype)
        self._stop_ids = tuple(stop_ids)
        self._counts = {"sequences": 0.0, "tokens": 0.0, "prompt_tokens": 0.0, "seconds": 0.0, "swaps": 0.0}
        self._awake = AwakeParts()
        self._adapted, self._sleeping = adapted is not None, wanted.sleeping
        use_threads(wanted.threads)
        self._logprobs_mode = wanted.logprobs_mode
        try:
            self._loader = self._started(model, wanted, adapted)
        except (ValueError, RuntimeError, NotImplementedError, NotFoundInVllm) as error:
            raise BadValue(f"vLLM can not serve {model}: {reason(error)}; rollout.engine = \"torch\" may",
                           setting="rollout.engine") from error
        self._own = named_tensors(self._skeleton)
        request = adapter_request() if adapted is not None else None
        self._flights = Flights(self._llm, self._parameters, joining, request)

    @classmethod
    def from_settings(cls, settings: Any) -> VllmEngine:
        """An engine for a run's settings. Raises NotFound without vLLM here, BadValue when it is another build.

        Where experience is as new as the weights, batches do not join: the numbers of such a run are its settings'.
        """
        policy, rollout = settings.policy, settings.rollout
        adapted = policy.lora.rank > 0 and policy.lora.publish == "adapter"
        wanted = Start(
            dtype=policy.publish_dtype, logprobs_mode=vllm_logprobs_mode(rollout), threads=rollout.threads,
            sequences=rollout.chunk_prompts * rollout.samples_per_prompt, device=rollout.device,
            tensor_parallel=rollout.tensor_parallel, gpu_memory=rollout.gpu_memory, cuda_graphs=rollout.cuda_graphs,
            sleeping=settings.run.placement == "colocated" and settings.run.colocated_offload,
            quantization=rollout.quantization,
            lora_rank=policy.lora.rank if adapted else 0, lora_targets=policy.lora.targets if adapted else ())
        return cls(policy.model, stop_ids=load_tokenizer(policy.model).stop_ids, wanted=wanted,
                   on_new_weights=rollout.on_new_weights, joining=settings.run.max_staleness > 0,
                   adapted=policy if adapted else None)

    @property
    def in_flight(self) -> bool:
        """See RolloutEngine.in_flight."""
        return bool(self._flights)

    def begin(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> Batch:
        """See RolloutEngine.begin. Raises NoWeights before the first `load_weights`."""
        self._awake.need(*WAKES)
        batch = Batch(items, sampling)
        if batch.done:
            return batch
        if self.held == NOTHING:
            raise NoWeights("this engine was given no weights yet")
        self._check_sampling(sampling)
        check_lengths(items, sampling, *self._positions())
        self._flights.begin(batch)
        return batch

    def step(self) -> None:
        """See RolloutEngine.step."""
        self._awake.need(*WAKES)
        started = time.perf_counter()
        for batch in self._flights.step():
            self._count(batch)
        self._counts["seconds"] += time.perf_counter() - started

    def drop(self, batch: Batch) -> None:
        """See RolloutEngine.drop."""
        self._flights.drop(batch)

    def generate(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> list[Completion]:
        """See engine.generate."""
        return generate(self, items, sampling)

    def load_weights(self, tensors: Mapping[str, np.ndarray], version: int, digest: str) -> str:
        """See RolloutEngine.load_weights. All arrays are checked before vLLM is given the first.

        The digest is of what vLLM's layers compute with, read back through their kernels; see `vllm_weights`. A version
        with numbers that are not finite is refused: it could not be read back. Raises WeightsLost when vLLM fails at
        it, or then computes with something else.
        """
        self._awake.need(WEIGHTS)
        check_offer(self.held, tensors, version, digest)
        check_nothing_in_flight(self)
        with unfit_is_refused(version):
            offered = fitting(self._own, tensors)
        before, self.held = self.held, NOTHING
        try:
            held = HeldWeights(version, self._loader.load(offered, version, digest))
            if held.digest == digest:
                self._flights.switch(held, self.on_new_weights)
        except WeightsRefused:
            self.held = before
            raise
        except Exception as error:  # vLLM's, of any kind: what is not reported, the job would wait for to its deadline
            self._flights.give_up()
            raise WeightsLost(f"version {version}: {type(error).__name__}: {error}") from error
        if held.digest != digest:
            self._flights.give_up()
            raise WeightsLost(f"vLLM was given version {version} with digest {digest[:16]}, and computes with "
                              f"{held.digest[:16]}")
        self.held = held
        self._counts["swaps"] += 1
        return held.digest

    def read_back(self) -> str:
        """See RolloutEngine.read_back."""
        self._awake.need(WEIGHTS)
        if self.held == NOTHING:
            raise NoWeights("this engine holds no version")
        return self._loader.read_back()

    def statistics(self) -> dict[str, float]:
        """See RolloutEngine.statistics. cached_tokens: of prompts, that did not have to be read."""
        rounded = self._loader.distances if isinstance(self._loader, Fp8) else {}
        return {**self._counts, "cached_tokens": float(self._flights.cached_tokens), **rounded}

    def sleep(self, level: int) -> None:
        """See Sleeper.sleep. With adapters the base, which no version brings, waits on the host at both levels.

        Raises EngineError where vLLM has no memory to give back, or was not started for it.
        """
        if not self._sleeping or self._device == CPU:
            raise EngineError("this engine can not sleep: vLLM gives memory back on GPUs, and only where it was "
                              "started for it, which run.placement = \"colocated\" does")
        if level not in (1, 2):
            raise EngineError(f"there is no sleep of level {level}: 1 keeps the weights on the host, 2 nowhere")
        check_may_sleep(self)
        if not self._awake:
            return
        self.wake(WAKES)  # vLLM sleeps whole
        self._llm.llm_engine.sleep(1 if self._adapted else level)
        self._awake.clear()
        if level == 2:
            self.held = NOTHING

    def wake(self, what: Sequence[str]) -> None:
        """See Sleeper.wake. Raises EngineError for the cache without the weights: with those comes what vLLM's kernels
        need of the model."""
        unknown = [name for name in what if name not in WAKES]
        if unknown:
            raise EngineError(f"nothing called {unknown[0]} sleeps: there are {' and '.join(WAKES)}")
        asleep = [name for name in WAKES if name in what and name not in self._awake]
        if asleep == [KV_CACHE] and WEIGHTS not in self._awake:
            raise EngineError(f"{WEIGHTS} wake before {KV_CACHE}")
        if asleep:
            self._llm.llm_engine.wake_up(asleep)
            self._awake.add(asleep)

    def _started(self, model: str, wanted: Start, adapted: TrainerSettings | None) -> Loader:
        """vLLM, started; the way of versions into it."""
        shapes = {name: tensor.shape for name, tensor in named_tensors(self._skeleton).items()}
        dtypes = {name: tensor.dtype for name, tensor in named_tensors(self._skeleton).items()}
        base = None if adapted is None else Base(adapted)
        with tempfile.TemporaryDirectory() as scratch:
            if base is not None:
                base.save(Path(scratch))
            self._llm, self._device = start(self._skeleton, model, wanted, scratch if base is not None else "")
        if wanted.tensor_parallel > 1:
            return PluginLoader(self._llm.collective_rpc, version_setter(self._llm.llm_engine), shapes)
        if wanted.quantization == "fp8":
            return Fp8(self._worker, self._worker(lambda worker: locate(worker.get_model(), shapes)))
        found = self._worker(lambda worker: places(worker.get_model(), shapes))
        loader: Packed | InPlace
        if self._device == CPU:
            loader = Packed(self._worker, found)
        else:
            loader = self._worker(lambda worker: InPlace(worker.get_model(), found, dtypes))
        if base is None or adapted is None:
            return loader
        if isinstance(loader, Packed):
            loader.remember(base.tensors)
        put_adapter(self._skeleton, adapted.lora, base.digest)
        return Adapters(self._worker, loader.read_back, base.digest, adapted.lora)

    def _positions(self) -> tuple[int, str]:
        """How many there are, and whose: vLLM takes fewer than the model has where its cache has no room for them."""
        room = int(self._llm.llm_engine.model_config.max_model_len)
        if room < self._skeleton.config.max_position_embeddings:
            whose = "rollout.env.VLLM_CPU_KVCACHE_SPACE" if self._device == CPU else "rollout.gpu_memory"
            return room, f"the key-value cache's ({whose})"
        return room, "the model's"

    def _check_sampling(self, sampling: SamplingSettings) -> None:
        """vLLM decides once, when it starts, which log-probs it gives; greedy ones are the same in both modes."""
        line = vllm_can_not(sampling)
        if not line and sampling.temperature > 0 and vllm_logprobs_mode(sampling) != self._logprobs_mode:
            line = f"vLLM was started with {self._logprobs_mode}, and rollout.top_p or rollout.top_k asks for others"
        if line:
            raise EngineError(line)

    def _parameters(self, sampling: SamplingSettings, most: int, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=most, seed=seed,
            logprobs=0, detokenize=False, ignore_eos=True, stop_token_ids=list(sampling.stop_ids or self._stop_ids),
            output_kind=RequestOutputKind.DELTA)

    def _worker(self, ask: Callable[[Any], Any]) -> Any:
        """What `ask` says of vLLM's worker, which is in this process."""
        [answer] = self._llm.collective_rpc(ask)
        return answer

    def _count(self, batch: Batch) -> None:
        self._counts["sequences"] += len(batch.items)
        self._counts["tokens"] += sum(len(completion.tokens) for completion in batch.answers())
        self._counts["prompt_tokens"] += sum(len(item.prompt) for item in batch.items)
