"""PPO and behaviour cloning for control: one model, trained on steps of a simulator.

Legend: S steps of fragments one after another (see `estimators`), n steps of a mini-batch, K actions of a chunk;
x, o, r, A as in `objectives`.

    update(batch):  rewards ──estimator──> advantages, returns ──epochs x mini_batches──> Adam steps
                    then the observations join the running moments
    clone(shown):   demonstrated chunks ──mini_batches──> Adam steps

The moments change after the steps, not before: the ratio of the first mini-batch is that of the policy which acted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from cosmos_actor.actors.seeds import seed_of
from cosmos_actor.simulator_bridge.contract import DISCRETE, ActionSpec, ArraySpec
from cosmos_actor.trainer.batch import BatchError
from cosmos_actor.trainer.control_scorer import ControlScorer, make_model
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.estimators import discounted_sums, gae, vtrace
from cosmos_actor.trainer.model_weights import host_copies, named_tensors
from cosmos_actor.trainer.models import use_threads
from cosmos_actor.trainer.objectives import kl_estimate, ppo_clip, value_loss
from cosmos_actor.trainer.observations import Seen
from cosmos_actor.trainer.policy import NotFinite
from cosmos_actor.trainer.running_moments import CLIP
from cosmos_actor.trainer.snapshots import Snapshot, Snapshots
from cosmos_actor.trainer.vla_model import shifted
from cosmos_actor.trainer.world import World

ADAM_EPSILON = 1e-5
"""cleanRL's and OpenAI's value: gradients of a small network often vanish, and steps must not explode then."""
ADVANTAGE_EPSILON = 1e-8
Part = Literal["joint", "actor", "critic"]
"""What a trainer trains: all of the model, or one of the two where the other is in another process."""
OF_THE_OTHER: dict[Part, tuple[str, ...]] = {
    "joint": (), "actor": ("loss/value", "explained_variance"),
    "critic": ("loss/policy", "entropy", "kl/old", "kl/reference", "clip/fraction", "ratio/first")}
"""Metrics that say nothing about what is trained here."""


class ControlBatch(NamedTuple):
    """What `ControlTrainer.update` takes, by name: fragments one after another, each ending with a boundary."""

    observations: Mapping[str, np.ndarray]
    """Name -> [S, …], what each action was chosen by."""
    actions: np.ndarray
    """[S] int64, or [S, …] float32 as drawn, not as bounded for the simulator; of a flow, its chains."""
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
    reference_logprobs: np.ndarray | None = None
    """[S] float32, where there is a reference."""


class Shown(NamedTuple):
    """What `ControlTrainer.clone` takes, by name: n moments of demonstrations."""

    observations: Mapping[str, np.ndarray]
    """Name -> [n, …]"""
    actions: np.ndarray
    """[n, K, …], as the simulator took them."""
    mask: np.ndarray
    """[n, K]: 1 where there is an action, 0 after the end of the episode."""


class Columns(NamedTuple):
    """A batch on the device, S rows each, and what was estimated for it."""

    seen: Seen
    actions: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def rows(self, index: torch.Tensor) -> Columns:
        return Columns(*(column.rows(index) if isinstance(column, Seen) else column[index] for column in self))


class ControlTrainer:
    """Guarantee: weights after update k are a function of settings, specs, seed and the k batches.

    The model (with its running moments), the optimiser and the count of updates are all that a checkpoint holds.
    """

    model_setting = "control.network"
    base_digest = ""
    """The whole model is trained."""

    def __init__(self, settings: ControlSettings, observations: Mapping[str, ArraySpec], action: ActionSpec, *,
                 seed: int, total_updates: int, cloning_updates: int = 0, part: Part = "joint",
                 world: World | None = None) -> None:
        self.settings, self.observations, self.action, self.part = settings, observations, action, part
        self.seed, self.total_updates, self.cloning_updates = seed, total_updates, cloning_updates
        self.world = world or World.alone(settings.device)
        if self.world.size > 1:
            raise ValueError(f"control is trained by one rank, not by {self.world.size}")
        self.model_name = _model_name(settings, observations, action)
        self.snapshots = Snapshots()
        self.reset()

    def reset(self) -> None:
        """Back to the state that settings, specs and seed describe."""
        self.snapshots.settle()
        self.updates = {"ppo": 0, "cloning": 0}
        self.model = make_model(self.settings, self.observations, self.action, self.seed).to(self.world.device)
        self.scorer = ControlScorer(self.model, self.settings.threads)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the moments of the gradient."""
        self._parameters = list(self.model.parameters())
        judges = {id(parameter) for part in self.model.judging() for parameter in part}
        groups = [{"params": [parameter for parameter in self._parameters if (id(parameter) in judges) is theirs]}
                  for theirs in (False, True)]
        rate = self.settings.ppo.learning_rate
        self.optimizer = torch.optim.Adam(groups, lr=rate, eps=ADAM_EPSILON, fused=True)

    def update(self, batch: Mapping[str, object]) -> dict[str, float]:
        """One PPO update on the fields of a ControlBatch. Returns the metrics. Raises BatchError and NotFinite."""
        started = time.perf_counter()
        use_threads(self.settings.threads)
        self.snapshots.before_a_write()
        given = _checked(ControlBatch(**batch), self.settings.ppo.mini_batches)  # type: ignore[arg-type]
        if self.updates["ppo"] in (0, self.settings.ppo.critic_first):
            self.reset_optimizer()  # moments of another loss, or of no gradient, would make the first steps too long
        seen = self.model.layout(given.observations)
        columns = self._columns(given, seen.to(self.world.device))
        rate = self._set_learning_rate(*self._ppo_rates())
        metrics = self._train(columns)
        if self.model.seen_moments is not None:
            self.model.seen_moments.include(seen.vectors)
        self.updates["ppo"] += 1
        metrics["explained_variance"] = _explained_variance(given.values, columns.returns.cpu().numpy())
        kept = {name: value for name, value in metrics.items() if name not in OF_THE_OTHER[self.part]}
        return {**kept, "learning_rate": rate, "steps": float(len(given.rewards)),
                "seconds/update": time.perf_counter() - started}

    def clone(self, batch: Mapping[str, object]) -> dict[str, float]:
        """One update on the fields of Shown, on a GPU with products in bfloat16. Returns the metrics.

        Raises BatchError and NotFinite.
        """
        started = time.perf_counter()
        use_threads(self.settings.threads)
        self.snapshots.before_a_write()
        cloning, given = self.settings.cloning, Shown(**batch)  # type: ignore[arg-type]
        if len(given.actions) < cloning.mini_batches:
            raise BatchError(f"{len(given.actions)} demonstrated moments do not fill {cloning.mini_batches} "
                             "mini-batches: lower control.cloning.mini_batches")
        seen = self.model.layout(given.observations).to(self.world.device)
        actions, mask = (torch.from_numpy(np.ascontiguousarray(column)).to(self.world.device)
                         for column in (given.actions, given.mask.astype(np.float32)))
        rate = self._set_learning_rate(self._cloning_rate())
        draw = torch.Generator().manual_seed(seed_of(f"{self.seed}/cloning/{self.updates['cloning']}"))
        losses, norms = [], []
        for part in torch.arange(len(actions)).tensor_split(cloning.mini_batches):
            rows = seen.rows(part)._replace(images=shifted(seen.images[part], cloning.shift, draw))
            with torch.autocast("cuda", torch.bfloat16, enabled=self.world.device.type == "cuda"):
                loss = self.model.cloning_loss(rows, actions[part], mask[part], draw)
            norms.append(self._descend(loss, f"update {self.updates['cloning'] + 1} (cloning)",
                                       "control.cloning.learning_rate"))
            losses.append(loss.detach())
        self.updates["cloning"] += 1
        return {"loss/cloning": float(torch.stack(losses).mean()), "grad_norm": float(torch.stack(norms).mean()),
                "learning_rate": rate, "seconds/update": time.perf_counter() - started}

    def weights(self) -> dict[str, np.ndarray]:
        """A host copy of every weight and running moment, by name."""
        return host_copies(named_tensors(self.model).items())

    def snapshot(self) -> Snapshot:
        """The same, in memory that is used again when it is released. It goes on while later steps compute."""
        return self.snapshots.take(named_tensors(self.model))

    def save(self, directory: str | Path) -> None:
        """Everything that an exact resume needs, below `directory`."""
        from cosmos_actor.trainer.checkpoint import save_trainer

        save_trainer(self, Path(directory))

    def load(self, directory: str | Path) -> None:
        """Continue exactly where `save` was called. Raises CheckpointError naming the file."""
        from cosmos_actor.trainer.checkpoint import load_trainer

        self.snapshots.settle()
        load_trainer(self, Path(directory))

    def close(self) -> None:
        """A single rank holds nothing that has to be let go."""

    def _columns(self, given: ControlBatch, seen: Seen) -> Columns:
        actions = self.scorer.recorded(given.actions)
        reference = given.logprobs if given.reference_logprobs is None else given.reference_logprobs
        plain = (torch.from_numpy(np.array(column, dtype=np.float32)).to(self.world.device)
                 for column in (given.logprobs, given.values, reference, *self._estimate(given, seen, actions)))
        return Columns(seen, actions, *plain)

    def _estimate(self, given: ControlBatch, seen: Seen, actions: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns [S] float64."""
        ppo, rewards = self.settings.ppo, self._scaled_rewards(given)
        if ppo.estimator == "gae":
            return gae(rewards, given.values, given.bootstrap, given.boundary, ppo.discount, ppo.gae_lambda)
        logprobs, values = self.scorer.score_tensors(seen, actions)
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
        """One optimiser step on -surrogate + c_v·value loss - c_e·entropy + c_k·KL, means over the rows of `part`."""
        ppo, alone = self.settings.ppo, self.updates["ppo"] < self.settings.ppo.critic_first
        policy, V = self.model.distribution(part.seen, detached=alone)
        x, o, A = policy.log_prob(part.actions), part.logprobs, part.advantages
        if ppo.normalise_advantage and len(A) > 1:
            A = (A - A.mean()) / (A.std() + ADVANTAGE_EPSILON)
        surrogate = ppo_clip(x, o, A, low=ppo.clip, high=ppo.clip)
        policy_loss, entropy = surrogate.loss.mean(), policy.entropy().mean()
        critic = value_loss(V, part.values, part.returns, clip=ppo.clip if ppo.clip_value else 0.0).mean()
        acts, of_reference = policy_loss - ppo.entropy_coefficient * entropy, {}
        if ppo.kl_coefficient > 0:
            of_reference["kl/reference"] = kl_estimate(x, part.reference, "k3").mean()
            acts = acts + ppo.kl_coefficient * of_reference["kl/reference"]
        judges = ppo.value_coefficient * critic
        if self.part == "actor":
            loss = acts * (0.0 if alone else 1.0)
        else:
            loss = judges if self.part == "critic" or alone else acts + judges
        norm = self._descend(loss, f"update {self.updates['ppo'] + 1} (ppo)", "control.ppo.learning_rate")
        distance = (surrogate.ratio - 1.0).abs()
        told = {"loss/total": loss, "loss/policy": policy_loss, "loss/value": critic, "entropy": entropy,
                "kl/old": kl_estimate(o, x.detach(), "k3").mean(),
                "clip/fraction": (distance > ppo.clip).float().mean(), "ratio/first": distance.max(), "grad_norm": norm,
                **of_reference}
        return dict(zip(told, torch.stack([value.detach() for value in told.values()]).tolist(), strict=True))

    def _descend(self, loss: torch.Tensor, what: str, rate_setting: str) -> torch.Tensor:
        """Returns the norm of the gradient before it was clipped. Raises NotFinite, and then changes nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in self._parameters:  # a loss need not reach all, and a checkpoint has the moments of all
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        bound = self.settings.ppo.max_grad_norm or math.inf
        apart = self.settings.ppo.value_learning_rate > 0
        groups = [group["params"] for group in self.optimizer.param_groups] if apart else [self._parameters]
        norm = torch.stack([torch.nn.utils.clip_grad_norm_(group, bound) for group in groups]).norm()
        if not math.isfinite(norm):
            raise NotFinite(f"a gradient of {what} is {float(norm)}, and no weight was changed by it; lower "
                            f"{rate_setting}")
        self.optimizer.step()
        return norm

    def _ppo_rates(self) -> tuple[float, float]:
        ppo = self.settings.ppo
        left = max(0.0, 1.0 - self.updates["ppo"] / self.total_updates) if ppo.anneal else 1.0
        return ppo.learning_rate * left, (ppo.value_learning_rate or ppo.learning_rate) * left

    def _cloning_rate(self) -> float:
        cloning, done = self.settings.cloning, self.updates["cloning"] / max(1, self.cloning_updates)
        return cloning.learning_rate * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)) if cloning.anneal else 1.0)

    def _set_learning_rate(self, rate: float, of_critic: float | None = None) -> float:
        acts, judges = self.optimizer.param_groups
        acts["lr"], judges["lr"] = rate, rate if of_critic is None else of_critic
        return rate


def _checked(given: ControlBatch, mini_batches: int) -> ControlBatch:
    """Raises BatchError for columns that do not fit together."""
    steps = len(given.rewards)
    for name, column in zip(ControlBatch._fields[1:], given[1:], strict=True):
        if column is not None and len(column) != steps:
            raise BatchError(f"{name} has {len(column)} rows, rewards have {steps}")
    if steps < mini_batches:
        raise BatchError(f"{steps} steps do not fill {mini_batches} mini-batches: lower control.ppo.mini_batches")
    if not given.boundary[-1]:
        raise BatchError("the last step is no boundary: what follows it is not known")
    return given


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
    if network.kind == "vla":
        layers = json.dumps(settings.flow.model_dump(exclude={"eta", "correlation", "noisy_steps"}))
    return " ".join([network.kind, layers, network.activation, "shared" if network.shared else "separate", *moments,
                     json.dumps(shapes), action.kind, json.dumps(acts)])
