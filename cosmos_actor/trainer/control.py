"""PPO for control: one model, trained on steps of a simulator.

Legend: S steps of fragments one after another (see `estimators`), n steps of a mini-batch; x, o, A as in `objectives`.

    update(batch):  rewards ──estimator──> advantages, returns ──epochs x mini_batches──> Adam steps
                    then the observations join the running moments

The moments change after the steps, not before: the ratio of the first mini-batch is that of the policy which acted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cosmos_actor.simulator_bridge.contract import DISCRETE, ActionSpec, ArraySpec
from cosmos_actor.trainer.batch import BatchError
from cosmos_actor.trainer.control_model import ControlModel
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.estimators import discounted_sums, gae, vtrace
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import use_threads
from cosmos_actor.trainer.objectives import kl_estimate, ppo_clip, value_loss
from cosmos_actor.trainer.observations import Seen
from cosmos_actor.trainer.policy import NotFinite
from cosmos_actor.trainer.running_moments import CLIP
from cosmos_actor.trainer.world import World

ADAM_EPSILON = 1e-5
"""cleanRL's and OpenAI's value: gradients of a small network often vanish, and steps must not explode then."""
ADVANTAGE_EPSILON = 1e-8
SCORE_ROWS = 4096
"""Steps of one forward pass outside of training: bounds the memory of activations of images."""


class ControlBatch(NamedTuple):
    """What `ControlTrainer.update` takes, by name: fragments one after another, each ending with a boundary."""

    observations: Mapping[str, np.ndarray]
    """Name -> [S, …], what each action was chosen by."""
    actions: np.ndarray
    """[S] int64, or [S, …] float32 as drawn, not as bounded for the simulator."""
    logprobs: np.ndarray
    """[S] float32, of the policy that acted."""
    values: np.ndarray
    """[S] float32, its own."""
    bootstrap: np.ndarray
    """[S] float32, value of what follows a boundary; see `estimators`."""
    boundary: np.ndarray
    """[S] bool"""
    rewards: np.ndarray
    """[S] float32, the simulator's own."""


class Columns(NamedTuple):
    """A batch on the device, S rows each, and what was estimated for it."""

    vectors: torch.Tensor
    images: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def rows(self, index: torch.Tensor) -> Columns:
        return Columns(*(column.index_select(0, index) for column in self))


class ControlTrainer:
    """Guarantee: weights after update k are a function of settings, specs, seed and the k batches.

    The model (with its running moments), the optimiser and the count of updates are all that a checkpoint holds.
    """

    model_setting = "control.network"

    def __init__(self, settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec, *,
                 seed: int, total_updates: int, world: World | None = None) -> None:
        self.settings, self.observations, self.action = settings, observations, action
        self.seed, self.total_updates = seed, total_updates
        self.world = world or World.alone(settings.device)
        if self.world.size > 1:
            raise ValueError(f"control is trained by one rank, not by {self.world.size}")
        self.model_name = _model_name(settings, observations, action)
        self.reset()

    def reset(self) -> None:
        """Back to the state that settings, specs and seed describe."""
        self.updates = {"ppo": 0}
        self.model = ControlModel(self.settings, self.observations, self.action, seed=self.seed).to(self.world.device)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the moments of the gradient."""
        self._parameters = list(self.model.parameters())
        rate = self.settings.ppo.learning_rate
        self.optimizer = torch.optim.Adam(self._parameters, lr=rate, eps=ADAM_EPSILON, fused=True)

    def update(self, batch: Mapping[str, object]) -> dict[str, float]:
        """One PPO update on the fields of a ControlBatch. Returns the metrics. Raises BatchError and NotFinite."""
        started = time.perf_counter()
        use_threads(self.settings.threads)
        given = _checked(ControlBatch(**batch), self.settings.ppo.mini_batches)  # type: ignore[arg-type]
        seen = self.model.layout(given.observations)
        columns = self._columns(given, seen)
        rate = self._set_learning_rate()
        metrics = self._train(columns)
        if self.model.seen_moments is not None:
            self.model.seen_moments.include(seen.vectors)
        self.updates["ppo"] += 1
        explained = _explained_variance(given.values, columns.returns.cpu().numpy())
        return {**metrics, "explained_variance": explained, "learning_rate": rate, "steps": float(len(given.rewards)),
                "seconds/update": time.perf_counter() - started}

    def weights(self) -> dict[str, np.ndarray]:
        """A host copy of every weight and running moment, by name."""
        return host_copies(named_tensors(self.model).items())

    def save(self, directory: str | Path) -> None:
        """Everything that an exact resume needs, below `directory`."""
        from cosmos_actor.trainer.checkpoint import save_trainer

        save_trainer(self, Path(directory))

    def load(self, directory: str | Path) -> None:
        """Continue exactly where `save` was called. Raises CheckpointError naming the file."""
        from cosmos_actor.trainer.checkpoint import load_trainer

        load_trainer(self, Path(directory))

    def close(self) -> None:
        """A single rank holds nothing that has to be let go."""

    def _columns(self, given: ControlBatch, seen: Seen) -> Columns:
        vectors, images = self.model.tensors(seen)
        actions = torch.from_numpy(_flat_actions(given.actions, self.action)).to(self.world.device)
        estimates = self._estimate(given, vectors, images, actions)
        plain = (torch.from_numpy(np.array(column, dtype=np.float32)).to(self.world.device)
                 for column in (given.logprobs, given.values, *estimates))
        return Columns(vectors, images, actions, *plain)

    def _estimate(self, given: ControlBatch, vectors: torch.Tensor, images: torch.Tensor, actions: torch.Tensor
                  ) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns [S] float64."""
        ppo, rewards = self.settings.ppo, self._scaled_rewards(given)
        if ppo.estimator == "gae":
            return gae(rewards, given.values, given.bootstrap, given.boundary, ppo.discount, ppo.gae_lambda)
        logprobs, values = self._score(vectors, images, actions)
        found = vtrace(logprobs - given.logprobs, rewards, values, given.bootstrap, given.boundary, ppo.discount,
                       ppo.gae_lambda, rho_bar=ppo.rho_bar, c_bar=ppo.c_bar)
        return found.advantages, found.returns

    def _scaled_rewards(self, given: ControlBatch) -> np.ndarray:
        """By the running std of what each fragment has earned so far, which begins at zero in every fragment."""
        moments = self.model.return_moments
        if moments is None:
            return given.rewards
        moments.include(discounted_sums(given.rewards, given.boundary, self.settings.ppo.discount)[:, None])
        return np.clip(given.rewards * float(moments.shift_and_scale()[1]), -CLIP, CLIP)

    @torch.no_grad()
    def _score(self, vectors: torch.Tensor, images: torch.Tensor, actions: torch.Tensor
               ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and values [S] under the present weights."""
        parts = []
        for start in range(0, len(actions), SCORE_ROWS):
            part = slice(start, start + SCORE_ROWS)
            policy, values = self.model.distribution(vectors[part], images[part])
            parts.append(torch.stack([policy.log_prob(actions[part]), values]))
        logprobs, values = torch.cat(parts, dim=1).cpu().numpy()
        return logprobs, values

    def _train(self, columns: Columns) -> dict[str, float]:
        """All passes. Means over mini-batches, but `kl/old` of the last pass and `ratio/first` of the first step."""
        ppo, steps, passes = self.settings.ppo, [], 0
        draw = np.random.default_rng((self.seed, self.updates["ppo"]))
        for _ in range(ppo.epochs):
            order = torch.from_numpy(draw.permutation(len(columns.actions))).to(self.world.device)
            steps += [self._step(columns.rows(index)) for index in order.tensor_split(ppo.mini_batches)]
            passes += 1
            if 0 < ppo.target_kl < np.mean([step["kl/old"] for step in steps[-ppo.mini_batches :]]):
                break
        means = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        means["kl/old"] = float(np.mean([step["kl/old"] for step in steps[-ppo.mini_batches :]]))
        return {**means, "ratio/first": steps[0]["ratio/first"], "epochs": float(passes)}

    def _step(self, part: Columns) -> dict[str, float]:
        """One optimiser step on -surrogate + c_v·value loss - c_e·entropy, means over the rows of `part`."""
        ppo = self.settings.ppo
        policy, V = self.model.distribution(part.vectors, part.images)
        x, o, A = policy.log_prob(part.actions), part.logprobs, part.advantages
        if ppo.normalise_advantage and len(A) > 1:
            A = (A - A.mean()) / (A.std() + ADVANTAGE_EPSILON)
        surrogate = ppo_clip(x, o, A, low=ppo.clip, high=ppo.clip)
        policy_loss, entropy = surrogate.loss.mean(), policy.entropy().mean()
        critic = value_loss(V, part.values, part.returns, clip=ppo.clip if ppo.clip_value else 0.0).mean()
        loss = policy_loss + ppo.value_coefficient * critic - ppo.entropy_coefficient * entropy
        norm = self._descend(loss)
        distance = (surrogate.ratio - 1.0).abs()
        names = ("loss/total", "loss/policy", "loss/value", "entropy", "kl/old", "clip/fraction", "ratio/first",
                 "grad_norm")
        values = (loss, policy_loss, critic, entropy, kl_estimate(o, x.detach(), "k3").mean(),
                  (distance > ppo.clip).float().mean(), distance.max(), norm)
        return dict(zip(names, torch.stack([value.detach() for value in values]).tolist(), strict=True))

    def _descend(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the norm of the gradient before it was clipped. Raises NotFinite, and then changes nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        bound = self.settings.ppo.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, bound)
        if not math.isfinite(norm):
            raise NotFinite(f"a gradient of update {self.updates['ppo'] + 1} (ppo) is {float(norm)}, and no weight was "
                            "changed by it; lower control.ppo.learning_rate")
        self.optimizer.step()
        return norm

    def _set_learning_rate(self) -> float:
        ppo = self.settings.ppo
        left = max(0.0, 1.0 - self.updates["ppo"] / self.total_updates) if ppo.anneal else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = ppo.learning_rate * left
        return ppo.learning_rate * left


def _checked(given: ControlBatch, mini_batches: int) -> ControlBatch:
    """Raises BatchError for columns that do not fit together."""
    steps = len(given.rewards)
    for name, column in zip(ControlBatch._fields[1:], given[1:], strict=True):
        if len(column) != steps:
            raise BatchError(f"{name} has {len(column)} rows, rewards have {steps}")
    if steps < mini_batches:
        raise BatchError(f"{steps} steps do not fill {mini_batches} mini-batches: lower control.ppo.mini_batches")
    if not given.boundary[-1]:
        raise BatchError("the last step is no boundary: what follows it is not known")
    return given


def _flat_actions(actions: np.ndarray, spec: ActionSpec) -> np.ndarray:
    """[S] int64 or [S, A] float32."""
    if spec.kind == DISCRETE:
        return np.ascontiguousarray(actions, dtype=np.int64)
    return np.ascontiguousarray(actions, dtype=np.float32).reshape(len(actions), -1)


def _explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - var(R - V) / var(R); 0 where all returns are equal."""
    spread = float(np.var(returns))
    return 1.0 - float(np.var(returns - values)) / spread if spread > 0 else 0.0


def _model_name(settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec) -> str:
    """All that decides names and shapes of the weights, on one line."""
    network = settings.network
    moments = [name for name in ("normalise_observations", "normalise_rewards") if getattr(settings.ppo, name)]
    shapes = {name: [observations[name].dtype, *observations[name].shape] for name in sorted(observations)}
    acts = [action.n] if action.kind == DISCRETE else list(action.shape)
    layers = "-".join(str(width) for width in network.hidden)
    return " ".join([network.kind, layers, network.activation, "shared" if network.shared else "separate", *moments,
                     json.dumps(shapes), action.kind, json.dumps(acts)])
