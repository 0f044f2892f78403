"""The rollout engine vLLM, in this process: its CPU build, eager, one request a sequence, token ids in and out.

vLLM lives in an environment of its own (`rollout.python`); nothing else of the package imports it. Its engine core is
kept in this process, so that what it computes with can be read back, and so that nothing is left of it when the
process is killed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_actor.actors.errors import BadValue, NotFound
from cosmos_actor.roles.engine import (
    WAIT,
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
    check_nothing_in_flight,
    generate,
)
from cosmos_actor.roles.engines import vllm_can_not, vllm_logprobs_mode
from cosmos_actor.roles.newer_weights import check_offer
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.roles.tokenizer import load_tokenizer
from cosmos_actor.roles.vllm_plugin.loader import PluginLoader, engine_arguments
from cosmos_actor.roles.vllm_steps import Flights
from cosmos_actor.roles.vllm_weights import NotFoundInVllm, Small, held_digest, pack_heads, places, small_numbers
from cosmos_actor.trainer.model_directory import model_directory
from cosmos_actor.trainer.model_weights import WeightsDoNotFit, fitting, named_tensors
from cosmos_actor.trainer.models import skeleton, use_threads
from cosmos_actor.trainer.tiny_model import TINY

IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Read when vLLM is imported."""
UNLESS_SET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several rollouts of one host would all be bound to the same cores
    "VLLM_LOGGING_LEVEL": "ERROR",  # below it, each swap warns of layers that have nothing to load
    "TORCHDYNAMO_DISABLE": "1",
}
"""`rollout.env` may say otherwise."""
LEAST_BATCHED_TOKENS = 2048
"""Tokens that one pass of vLLM may read."""
CACHE_BLOCK = 32
"""Tokens: what prompts have in common is found in whole blocks. The least that its CPU build computes well with."""
NOTHING = HeldWeights(version=-1, digest="")


class VllmEngine:
    """Implements RolloutEngine; see `vllm_steps` for how batches are brought on together.

    Unless they are `joining`, an answer is a function of its batch, the settings and the weights held. It begins
    without weights, and then raises NoWeights; so it does after a swap that vLLM failed at, since nothing is ever
    sampled with half of a version.
    """

    def __init__(self, model: str, *, stop_ids: Sequence[int], dtype: str = "float32", logprobs_mode: str,
                 sequences: int = 256, threads: int = 1, on_new_weights: OnNewWeights = WAIT,
                 joining: bool = False, tensor_parallel: int = 1) -> None:
        """tensor_parallel: more than 1 puts the model into as many processes, each with a part; see `vllm_plugin`."""
        self.held = NOTHING
        self.on_new_weights = on_new_weights
        self._loader: PluginLoader | None = None
        self._skeleton = skeleton(model, dtype=dtype)
        self._stop_ids = tuple(stop_ids)
        self._counts = {"sequences": 0.0, "tokens": 0.0, "prompt_tokens": 0.0, "seconds": 0.0, "swaps": 0.0}
        self._small: dict[str, Small] = {}
        use_threads(threads)
        self._logprobs_mode = logprobs_mode
        shapes = {name: tensor.shape for name, tensor in named_tensors(self._skeleton).items()}
        try:
            if tensor_parallel > 1:
                self._llm = _start(self._skeleton, model, dtype, logprobs_mode, sequences, tensor_parallel, threads)
                self._loader = PluginLoader(self._llm.collective_rpc, self._llm.llm_engine.set_weight_version, shapes)
            else:
                self._llm = _start(self._skeleton, model, dtype, logprobs_mode, sequences)
                self._places = self._of_model(lambda own: places(own, shapes))
        except (ValueError, RuntimeError, NotImplementedError, NotFoundInVllm) as error:
            raise BadValue(f"vLLM can not serve {model}: {reason(error)}; rollout.engine = \"torch\" may",
                           setting="rollout.engine") from error
        self._flights = Flights(self._llm, self._parameters, joining)

    @classmethod
    def from_settings(cls, settings: Any) -> VllmEngine:
        """An engine for a run's settings. Raises NotFound without vLLM here, BadValue when it is no CPU build.

        Where experience is as new as the weights, batches do not join: the numbers of such a run are its settings'.
        """
        policy, rollout = settings.policy, settings.rollout
        return cls(policy.model, stop_ids=load_tokenizer(policy.model).stop_ids, dtype=policy.publish_dtype,
                   logprobs_mode=vllm_logprobs_mode(rollout), threads=rollout.threads,
                   sequences=rollout.chunk_prompts * rollout.samples_per_prompt,
                   on_new_weights=rollout.on_new_weights, joining=settings.run.max_staleness > 0,
                   tensor_parallel=rollout.tensor_parallel)

    @property
    def in_flight(self) -> bool:
        """See RolloutEngine.in_flight."""
        return bool(self._flights)

    def begin(self, items: Sequence[GenerateItem], sampling: SamplingSettings) -> Batch:
        """See RolloutEngine.begin. Raises NoWeights before the first `load_weights`."""
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
        check_offer(self.held, tensors, version, digest)
        check_nothing_in_flight(self)
        offered = self._fitting(tensors, version)
        before, self.held = self.held, NOTHING
        try:
            held = HeldWeights(version, self._swap(offered, version, digest))
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
        if self._loader is not None:
            return self._loader.read_back()
        return str(self._of_model(lambda own: held_digest(own, self._places, self._small)))

    def statistics(self) -> dict[str, float]:
        """See RolloutEngine.statistics. cached_tokens: of prompts, that did not have to be read."""
        return {**self._counts, "cached_tokens": float(self._flights.cached_tokens)}

    def _positions(self) -> tuple[int, str]:
        """How many there are, and whose: vLLM takes fewer than the model has where its cache has no room for them."""
        room = int(self._llm.llm_engine.model_config.max_model_len)
        if room < self._skeleton.config.max_position_embeddings:
            return room, "the key-value cache's (rollout.env.VLLM_CPU_KVCACHE_SPACE)"
        return room, "the model's"

    def _check_sampling(self, sampling: SamplingSettings) -> None:
        """vLLM decides once, when it starts, which log-probs it gives; greedy ones are the same in both modes."""
        line = vllm_can_not(sampling)
        if not line and sampling.temperature > 0 and vllm_logprobs_mode(sampling) != self._logprobs_mode:
            line = f"vLLM was started with {self._logprobs_mode}, and rollout.top_p or rollout.top_k asks for others"
        if line:
            raise EngineError(line)

    def _swap(self, offered: dict[str, torch.Tensor], version: int, digest: str) -> str:
        """Hand `offered` to vLLM; the digest of what it then computes with."""
        if self._loader is not None:
            return self._loader.load(offered, version, digest)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(offered.items())})
        self._of_model(pack_heads)
        self._small = small_numbers(offered)
        return self.read_back()

    def _fitting(self, tensors: Mapping[str, np.ndarray], version: int) -> dict[str, torch.Tensor]:
        try:
            offered = fitting(self._skeleton, tensors)
        except WeightsDoNotFit as error:
            raise WeightsRefused(f"version {version}: {error}") from error
        for name, tensor in offered.items():
            if not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():  # a tenth of the time of looking at each
                raise WeightsRefused(f"version {version}: {name} has numbers that are not finite")
        return offered

    def _parameters(self, sampling: SamplingSettings, most: int, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=most, seed=seed,
            logprobs=0, detokenize=False, ignore_eos=True, stop_token_ids=list(sampling.stop_ids or self._stop_ids),
            output_kind=RequestOutputKind.DELTA)

    def _of_model(self, ask: Any) -> Any:
        """What `ask` says of vLLM's model, which is in this process."""
        [answer] = self._llm.collective_rpc(lambda worker: ask(worker.get_model()))
        return answer

    def _count(self, batch: Batch) -> None:
        self._counts["sequences"] += len(batch.items)
        self._counts["tokens"] += sum(len(completion.tokens) for completion in batch.answers())
        self._counts["prompt_tokens"] += sum(len(item.prompt) for item in batch.items)


def reason(error: Exception) -> str:
    """vLLM's own words, without what pydantic, which may carry them, adds about its input."""
    mistakes = getattr(error, "errors", None)
    if not callable(mistakes):
        return str(error)
    return "; ".join(str(mistake["msg"]).removeprefix("Value error, ").rstrip(".") for mistake in mistakes())


def _start(model: Any, name: str, dtype: str, logprobs_mode: str, sequences: int, tensor_parallel: int = 1,
           threads: int = 1) -> Any:
    """vLLM's engine with room for the model's weights and nothing in it."""
    os.environ.update(IN_THIS_PROCESS)
    if tensor_parallel > 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # each worker reads it when it imports torch
    for variable, value in UNLESS_SET.items():
        os.environ.setdefault(variable, value)
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform
    except ImportError as error:
        raise NotFound(f"rollout.engine = \"vllm\" needs vLLM in rollout.python: {error}",
                       setting="rollout.python") from error
    if not current_platform.is_cpu():
        raise BadValue("rollout.engine = \"vllm\" drives the CPU build of vLLM, and another is installed",
                       setting="rollout.python")
    with tempfile.TemporaryDirectory() as scratch:
        engine = LLM(
            _directory(model, name, Path(scratch)), skip_tokenizer_init=True, load_format="dummy", dtype=dtype,
            enforce_eager=True, logprobs_mode=logprobs_mode, max_num_seqs=sequences, seed=0, disable_log_stats=True,
            max_model_len=-1, max_num_batched_tokens=max(LEAST_BATCHED_TOKENS, sequences), enable_prefix_caching=True,
            block_size=CACHE_BLOCK, async_scheduling=False,  # else a step would sample on with what was there before
            **(engine_arguments(tensor_parallel) if tensor_parallel > 1 else {}))
    # Some models are refused only when they compute: those with heads of 16 numbers are.
    engine.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return engine


def _directory(model: Any, name: str, scratch: Path) -> str:
    """A folder with the model's configuration; a tiny model has none of its own."""
    if not name.startswith(TINY):
        return str(model_directory(name))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(scratch)
    return str(scratch)
