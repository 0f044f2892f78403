"""Policy for control: trains on fragments. The network is made when the run knows what its simulators are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.disk import writing
from cosmos_actor.actors.fragment import Fragment
from cosmos_actor.actors.role import handles
from cosmos_actor.actors.run_directory import write_whole
from cosmos_actor.roles.control_messages import CloneRequest, Prepared, PrepareRequest
from cosmos_actor.roles.messages import Restored, RestoreRequest, UpdateReply
from cosmos_actor.roles.policy import PolicyRole
from cosmos_actor.simulator_bridge.contract import Description
from cosmos_actor.trainer.checkpoint import CheckpointError
from cosmos_actor.trainer.instructions import observations_of

BODY_FILE = "simulator.json"


class NotPrepared(Exception):
    """Asked to train, publish or save before it was told what the simulators are."""


class ControlPolicyRole(PolicyRole):
    """Between a restore and `prepare` it only knows which checkpoint it is to become."""

    part = "joint"
    """What of the model it trains."""

    def device(self) -> str:
        return str(self.context.settings.control.device)

    def setup(self) -> None:
        self.body = ""
        self.checkpoint: Path | None = None
        super().setup()

    def _make_trainer(self) -> Any:
        return Unprepared()

    @handles(RestoreRequest)
    def restore(self, request: RestoreRequest) -> Restored:
        self.begin_life(request.epoch)
        self.outbox.clear()
        self.trainer.close()
        self.trainer = Unprepared()
        self.checkpoint = None if request.directory is None else Path(request.directory) / self.name
        self.step, self.answer, self.stall_s = request.step, None, 0.0
        return Restored(self.name, self.step)

    @handles(PrepareRequest)
    def prepare(self, request: PrepareRequest) -> Prepared:
        """Raises CheckpointError for a checkpoint of another body or another network."""
        self.refuse_another_life(request.epoch)
        from cosmos_actor.trainer.control import ControlTrainer
        from cosmos_actor.trainer.world import World

        settings, description = self.context.settings, request.description
        part = "actor" if self.part == "joint" and settings.critic_count else self.part
        self.body = description.embodiment
        trainer = ControlTrainer(
            settings.control, observations_of(description, kind=settings.control.network.kind), description.action,
            seed=settings.run.seed, total_updates=settings.run.steps, cloning_updates=settings.policy.sft_steps,
            part=part, world=World.alone(self.device()))
        if self.checkpoint is not None:
            with self.pause(f"checkpoint {self.step}"):
                refuse_another_body(self.checkpoint, description)
                trainer.load(self.checkpoint)
        self.trainer = AdaptedTrainer(trainer, self.body)
        return Prepared(self.step, sum(int(tensor.size) for tensor in trainer.weights().values()))


    @handles(CloneRequest)
    def clone(self, request: CloneRequest) -> UpdateReply:
        shown = request.shown
        return self._once(request, lambda: self.trainer.clone(
            {"observations": shown.observations, "actions": shown.actions, "mask": shown.mask}))


class Unprepared:
    """In the place of a trainer: whatever is asked of it raises NotPrepared."""

    def close(self) -> None:
        """There is nothing to close."""

    def __getattr__(self, name: str) -> Any:
        raise NotPrepared(f"the policy was asked for {name} before it was told what the simulators are")


class AdaptedTrainer:
    """A ControlTrainer under the names that the policy role calls."""

    def __init__(self, trainer: Any, body: str) -> None:
        self._trainer, self._body = trainer, body
        self.clone, self.values = trainer.clone, trainer.scorer.values
        self.weights, self.load, self.reset, self.close = trainer.weights, trainer.load, trainer.reset, trainer.close
        self.snapshot = trainer.snapshot

    def grpo_step(self, groups: Sequence[Fragment]) -> dict[str, float]:
        """One PPO update on fragments in the order given."""
        return self._trainer.update(batch_of(groups, self._trainer.settings.ppo.bootstrap_truncated))

    def save(self, directory: Path) -> None:
        self._trainer.save(directory)
        with writing(directory / BODY_FILE):
            write_whole(directory / BODY_FILE, json.dumps({"embodiment": self._body}))


def batch_of(groups: Sequence[Fragment], bootstrap_truncated: bool) -> dict[str, Any]:
    """The fields of a ControlBatch: fragments one after another.

    What follows a termination is worth nothing; what follows a truncation is, unless the settings take it for an end.
    The last step of a fragment is only cut off by the fragment.
    """
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(group, name) for group in groups])

    bootstrap = []
    for group in groups:
        worth = np.where(group.terminated.astype(bool), np.float32(0), group.bootstrap)
        if not bootstrap_truncated:
            worth = np.where(group.truncated.astype(bool), np.float32(0), worth)
        bootstrap.append(worth)
    return {
        "observations": {name: np.concatenate([group.observations[name] for group in groups])
                         for name in groups[0].observations},
        "actions": joined("actions"), "logprobs": joined("logprobs"), "values": joined("values"),
        "bootstrap": np.concatenate(bootstrap).astype(np.float32), "boundary": joined("boundary").astype(bool),
        "rewards": joined("rewards"),
        "reference_logprobs": None if groups[0].reference_logprobs is None else joined("reference_logprobs"),
    }


def refuse_another_body(directory: Path, description: Description) -> None:
    """Raises CheckpointError when `directory` is of a policy that was trained in another body."""
    file = directory / BODY_FILE
    try:
        known = str(json.loads(file.read_text(encoding="utf-8"))["embodiment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} can not be read: {error}") from error
    if known != description.embodiment:
        raise CheckpointError(f"{file} is of embodiment {known[:12] or 'none'}, {description.simulator} has "
                              f"{description.embodiment[:12] or 'none'}")
