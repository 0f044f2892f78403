"""The policy trainer: supervised and GRPO updates of one model, on one rank or several.

Legend: B sequences, T longest sequence; x, o, r, A, m, w as in `objectives`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_actor.actors.trajectory import TrajectoryGroup
from cosmos_actor.trainer.adapter import base_digest_of, load_trained_model, merged_tensors, save_adapter
from cosmos_actor.trainer.advantages import grpo_advantages
from cosmos_actor.trainer.batch import Batch, BatchError, batch_from_groups, micro_batches, mini_batch_rows, ragged
from cosmos_actor.trainer.correction import correction, correction_metrics, mismatch, newest_mismatch
from cosmos_actor.trainer.forward import Scores, score_batch, score_tokens
from cosmos_actor.trainer.metrics import Meter
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import DTYPES, recompute_activations, use_threads
from cosmos_actor.trainer.objectives import cross_entropy, kl_estimate, ppo_clip, token_weights
from cosmos_actor.trainer.parking import Parked, ParkingPlace, begin_measuring, memory_used
from cosmos_actor.trainer.settings import TrainerSettings
from cosmos_actor.trainer.snapshots import Snapshot, Snapshots
from cosmos_actor.trainer.world import World

TokenLoss = Callable[[Scores, dict[str, torch.Tensor], Meter], torch.Tensor]


class NotFinite(Exception):
    """A gradient that would make a NaN of every weight."""


class PolicyTrainer:
    """Owns the model, its optimiser and the counts of updates: together they are all that a checkpoint holds.

    The loss of a batch depends on neither micro-batches nor ranks: token weights are computed over the whole batch.
    On several ranks every rank makes the same calls in the same order with the same arguments. Between `park` and
    `unpark` whatever needs the model raises Parked, but for `load` and `reset`, which have it back first.
    """

    model_setting = "policy.model"

    def __init__(self, settings: TrainerSettings, *, temperature: float = 1.0, world: World | None = None) -> None:
        self.settings = settings
        self.model_name = settings.model
        self.temperature = temperature or 1.0  # greedy answers are scored at 1, as the engine scores them
        self.world = world or World.alone(settings.device)
        self.snapshots: Any = Snapshots()
        self.reset()

    def reset(self) -> None:
        """Back to the state that the settings alone describe. A collective."""
        settings = self.settings
        self.snapshots.settle()
        self.parking = ParkingPlace(self.world.device)
        self.updates = {"sft": 0, "policy": 0}
        model = load_trained_model(settings, self.world.device)
        if settings.gradient_checkpointing:
            recompute_activations(model)
        self.model = self.world.shard(model, DTYPES[settings.dtype])
        self._autocast = self.world.autocast(DTYPES[settings.dtype])
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the moments."""
        self.optimizer = _make_optimizer(self.model, self.settings)

    def park(self) -> int:
        """All that is on the device waits on the host; how many bytes that were. On each rank by itself.

        Gradients are dropped: they are of a step that is done. Snapshots stay what they are.
        """
        self.snapshots.settle()
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # of FSDP2: a root keeps its gathered weights after a forward pass
        self.optimizer.zero_grad(set_to_none=True)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        frozen = [one for one in self.model.parameters() if not one.requires_grad]
        moments = [one for state in self.optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        return self.parking.park([*trained, *moments, *self.model.buffers()], frozen)

    def unpark(self) -> int:
        """Everything is on the device again, bit for bit; how many bytes came. Measures of memory begin anew."""
        begin_measuring(self.world.device)
        return self.parking.unpark()

    def memory(self) -> tuple[int, int]:
        """See parking.memory_used."""
        return memory_used(self.world.device)

    def _need_device(self, what: str) -> None:
        if self.parking.parked:
            raise Parked(f"{what}: the policy's state waits on the host, it is not its turn on the GPU "
                         "(run.colocated_offload)")

    def sft_step(self, batch: Batch) -> dict[str, float]:
        """One supervised update on a batch from `batch_from_examples`. Returns the metrics, loss before the update."""
        return self._update(batch, token_weights(batch.mask, "token-mean"), _sft_loss, "sft")

    def grpo_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """`mini_batches` updates on scored groups. Returns the metrics, averaged over the updates."""
        return self.policy_step(*self.policy_batch(groups))

    def policy_batch(self, groups: Sequence[TrajectoryGroup]) -> tuple[Batch, list[np.ndarray]]:
        """The groups as a batch with advantages, and the rows of each mini-batch."""
        grpo = self.settings.grpo
        if grpo.kl_coefficient > 0 and any(group.reference_logprobs is None for group in groups):
            raise BatchError("policy.grpo.kl_coefficient > 0 needs reference log-probs, and a group has none")
        advantage = partial(grpo_advantages, epsilon=grpo.advantage_epsilon, normalise_std=grpo.normalise_std)
        return batch_from_groups(groups, advantage), mini_batch_rows(groups, grpo.mini_batches)

    def policy_step(self, batch: Batch, mini_batches: Sequence[np.ndarray]) -> dict[str, float]:
        """One update on each of `mini_batches` (row indices) of `batch`.

        `mismatch/…` compares the engine's log-probs with the trainer's before any of the updates: of all tokens where
        they are recomputed, else of those of the first mini-batch.
        """
        recomputed = self.settings.grpo.old_logprobs == "recomputed"
        compared: dict[str, float] = {}
        if recomputed:
            batch, compared = self._with_own_logprobs(batch, mini_batches)
        loss = partial(_grpo_loss, settings=self.settings.grpo)
        results = [
            self._update(*self._with_gradient(batch.rows(rows)), loss, "policy", compare=not recomputed and index == 0)
            for index, rows in enumerate(mini_batches)
        ]
        return {**_combined(results), **compared}

    def _with_own_logprobs(
        self, batch: Batch, mini_batches: Sequence[np.ndarray]
    ) -> tuple[Batch, dict[str, float]]:
        """`batch` with the trainer's log-probs in the ratio and corrected advantages; how far the engine's are off.

        Each mini-batch is scored as it will be trained, so that its first ratio is exactly 1.
        """
        x = np.zeros_like(batch.old_logprobs)
        for rows in mini_batches:
            scores = self.score(batch.rows(rows))
            x[rows, : scores.shape[1]] = scores
        metrics = _compared(x, batch)
        batch, how = batch.with_old_logprobs(x), self.settings.grpo.correction
        if how.level == "none":
            return batch, metrics
        made = correction(x, batch.engine_logprobs, batch.mask, level=how.level, rule=how.rule, cap=how.cap,
                          floor=how.floor)
        return batch.weighted(made.weights), metrics | correction_metrics(made, batch.mask)

    def logprobs(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """The log-probs of the sampled tokens under the present weights: one [N] float32 a group."""
        batch = batch_from_groups(groups)
        return ragged(batch, self.score(batch), groups)

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs [B, T] float32 of the learned tokens, the same on every rank; zero elsewhere."""
        self._need_device("log-probs")
        use_threads(self.settings.threads)
        result = np.zeros(batch.tokens.shape, dtype=np.float32)
        for rows, weight in self._my_parts(batch):
            part = batch.rows(rows)
            scores = score_batch(
                self.model, part, temperature=self.temperature, max_tokens=1 << 60, autocast=self._autocast
            )
            result[rows, : scores.shape[1]] += scores * weight
        return self.world.sum_array(result)

    def weights(self) -> dict[str, np.ndarray]:
        """A host copy of every weight, whole, in `publish_dtype`, under its Hugging Face name. A collective.

        With an adapter: of the adapter's, under peft's names, unless the two are published as one model.
        """
        self._need_device("a copy of the weights")
        return host_copies((name, self._published(tensor)) for name, tensor in self._offered().items())

    @property
    def base_digest(self) -> str:
        """Of the frozen base as it would be published whole; empty where the whole model is trained."""
        return base_digest_of(self.model)

    def snapshot(self) -> Snapshot | None:
        """The same, in memory that is used again when it is released; None on other ranks than the first. A collective.

        It goes on while later steps compute: see `snapshots`.
        """
        self._need_device("a snapshot")
        own = self._offered()
        if self.world.rank == 0:
            return self.snapshots.take(own, DTYPES[self.settings.publish_dtype], self.world.full)
        for tensor in own.values():
            self.world.full(tensor.detach())
        return None

    def _offered(self) -> Mapping[str, torch.Tensor]:
        """What engines receive, before it is gathered and cast. A collective where it is merged."""
        if self.settings.lora.rank and self.settings.lora.publish == "merged":
            return merged_tensors(self.model, DTYPES[self.settings.publish_dtype], self.world.full)
        return named_tensors(self.model)

    def _published(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self.world.full(tensor.detach())
        return whole.to(DTYPES[self.settings.publish_dtype]) if whole.is_floating_point() else whole

    def save(self, directory: str | Path) -> None:
        """Everything that an exact resume needs, below `directory`. A collective."""
        from cosmos_actor.trainer.checkpoint import save_trainer

        self._need_device("a checkpoint")
        save_trainer(self, Path(directory), self._save_adapter if self.base_digest else None)

    def load(self, directory: str | Path) -> None:
        """Continue exactly where `save` was called. Raises CheckpointError naming the file. A collective."""
        from cosmos_actor.trainer.checkpoint import load_trainer

        self.snapshots.settle()
        self.unpark()
        load_trainer(self, Path(directory))

    def _save_adapter(self, checkpoint: Path) -> None:
        rank = self.world.rank
        save_adapter(self.model, self.settings, checkpoint / "adapter", self.world.full, write=rank == 0)

    def _with_gradient(self, batch: Batch) -> tuple[Batch, np.ndarray]:
        """The rows that have a gradient, and their weights in the loss of the whole batch.

        Where ties teach nothing the loss of a tied group is exactly zero: its forward pass would be for nothing.
        """
        grpo = self.settings.grpo
        weights = token_weights(batch.mask, grpo.aggregation, length=grpo.aggregation_length)
        rows = np.flatnonzero(batch.advantages.any(axis=1))
        if grpo.ties_teach or len(rows) == 0:
            return batch, weights
        return batch.rows(rows), weights[rows]

    def _update(
        self, batch: Batch, weights: np.ndarray, token_loss: TokenLoss, kind: str, *, compare: bool = False
    ) -> dict[str, float]:
        """One optimiser step on the gradient of Σ w·l over `batch`. Metrics are of the rows given. Raises NotFinite.

        `compare`: also what the log-probs before the step are to the engine's.
        """
        self._need_device(f"update {self.updates[kind] + 1} ({kind})")
        started = time.perf_counter()
        use_threads(self.settings.threads)
        meter = Meter(batch.token_count)
        self.optimizer.zero_grad(set_to_none=True)
        seen: list[tuple[np.ndarray, torch.Tensor]] = []
        for rows, share in self._my_parts(batch):
            scores = self._backward(batch.rows(rows), weights[rows] * share, token_loss, meter)
            seen += [(rows, scores)] if compare and share else []
        norm = self._clip_gradients()
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient of update {self.updates[kind] + 1} ({kind}) is {norm}, and no weight was "
                            f"changed by it; lower policy.{'sft' if kind == 'sft' else 'optimizer'}.learning_rate")
        rate = self._set_learning_rate(kind)
        self.snapshots.before_a_write()
        self.optimizer.step()
        self.updates[kind] += 1
        result = meter.totals(self.world)
        if compare:
            result.update(_compared(self._gathered(seen, batch), batch))
        result.update({"grad_norm": norm, "learning_rate": rate, "seconds/update": time.perf_counter() - started})
        return result

    def _gathered(self, seen: Sequence[tuple[np.ndarray, torch.Tensor]], batch: Batch) -> np.ndarray:
        """[B, T] float32 of the rows that each rank has seen, the same on every rank. A collective."""
        values = np.zeros_like(batch.engine_logprobs)
        for rows, logprobs in seen:
            values[rows, : logprobs.shape[1]] = logprobs.cpu().numpy()
        return self.world.sum_array(values)

    def _backward(self, part: Batch, weights: np.ndarray, token_loss: TokenLoss, meter: Meter) -> torch.Tensor:
        """Add to the gradients; the log-probs [B, T] of the part."""
        columns = self._columns(part)
        scores = score_tokens(
            self.model, part, temperature=self.temperature, autocast=self._autocast,
            entropy_gradient=self.settings.grpo.entropy_coefficient > 0,
        )
        w = torch.from_numpy(weights[:, : part.tokens.shape[1]].astype(np.float32)).to(scores.logprobs.device)
        meter.begin(w, columns["mask"])
        loss = (token_loss(scores, columns, meter) * w).sum()
        meter.add("loss/total", loss)
        meter.token_mean("entropy", scores.entropy)
        (loss * self.world.size).backward()
        return scores.logprobs.detach()

    def _my_parts(self, batch: Batch) -> list[tuple[np.ndarray, float]]:
        """This rank's micro-batches. All ranks have equally many; a filler has weight 0."""
        total = int(batch.lengths.max()) * batch.size
        limit = min(self.settings.micro_batch_tokens, -(-total // self.world.size))
        parts = [(rows, 1.0) for rows in micro_batches(batch.lengths, limit)]
        parts += [(parts[0][0][:1], 0.0)] * (-len(parts) % self.world.size)
        return parts[self.world.rank :: self.world.size]

    def _columns(self, part: Batch) -> dict[str, torch.Tensor]:
        names = ("mask", "engine_logprobs", "old_logprobs", "reference_logprobs", "advantages")
        return {name: torch.from_numpy(getattr(part, name)).to(self.world.device) for name in names}

    def _clip_gradients(self) -> float:
        bound = self.settings.optimizer.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), bound)
        return float(self.world.full(norm))

    def _set_learning_rate(self, kind: str) -> float:
        owner: Any = self.settings.sft if kind == "sft" else self.settings.optimizer
        warmed = min(1.0, (self.updates[kind] + 1) / owner.warmup_steps) if owner.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = owner.learning_rate * warmed
        return float(owner.learning_rate * warmed)


def _compared(x: np.ndarray, batch: Batch) -> dict[str, float]:
    columns = (x, batch.engine_logprobs, batch.mask)
    return {**mismatch(*columns), **newest_mismatch(*columns, batch.versions)}


def _sft_loss(scores: Scores, columns: dict[str, torch.Tensor], meter: Meter) -> torch.Tensor:
    return cross_entropy(scores.logprobs)


def _grpo_loss(
    scores: Scores, columns: dict[str, torch.Tensor], meter: Meter, settings: Any
) -> torch.Tensor:
    """max(-A·ρ, -A·clip ρ) + β·KL(policy ‖ reference) - η·H(policy), per token [B, T]."""
    x, o, r, A = scores.logprobs, columns["old_logprobs"], columns["reference_logprobs"], columns["advantages"]
    policy = ppo_clip(x, o, A, low=settings.clip_low, high=settings.clip_high, dual=settings.dual_clip)
    meter.token_mean("ratio/mean", policy.ratio)
    meter.token_max("ratio/distance_max", (policy.ratio - 1.0).abs())
    meter.token_mean("clip/fraction", policy.clipped.float())
    meter.token_max("logprob/engine_distance_max", (x.detach() - columns["engine_logprobs"]).abs())
    meter.weighted("loss/policy", policy.loss)
    loss = policy.loss
    if settings.kl_coefficient > 0:
        kl = kl_estimate(x, r, settings.kl_estimator)
        meter.token_mean("kl/reference", kl)
        loss = loss + settings.kl_coefficient * kl
    return loss - settings.entropy_coefficient * scores.entropy if settings.entropy_coefficient > 0 else loss


def _make_optimizer(model: torch.nn.Module, settings: TrainerSettings) -> torch.optim.Optimizer:
    owner = settings.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": owner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=owner.learning_rate,
        betas=(owner.beta1, owner.beta2),
        eps=owner.epsilon,
    )


def _combined(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Maxima of `…_max`, sums of seconds, means of the rest."""
    combined: dict[str, float] = {}
    for name in results[0]:
        values = [result[name] for result in results if name in result]
        whole = max if name.endswith("_max") else sum if name.startswith("seconds/") else np.mean
        combined[name] = float(whole(values))
    return combined
