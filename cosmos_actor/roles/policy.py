"""Policy: trains, publishes what it trained, saves and restores it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.role import handles
from cosmos_actor.roles.array_file import read_arrays, write_arrays
from cosmos_actor.roles.messages import (
    Published,
    PublishReferenceRequest,
    PublishRequest,
    Restored,
    RestoreRequest,
    Saved,
    SaveRequest,
    SftRequest,
    UpdateReply,
    UpdateRequest,
)
from cosmos_actor.roles.stateful import StatefulRole
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.version import Version

REFERENCE_FILE = "reference.npz"


class OutOfStep(Exception):
    """The controller asked for another step than the next one: one of the two missed a rewind."""


class PolicyRole(StatefulRole):
    """Guarantee: step k of the optimiser happens once in a life of the job; asked for again, its answer is repeated."""

    name = "policy"

    def setup(self) -> None:
        settings = self.context.settings
        self.trainer = self._make_trainer()
        self.step = 0
        self.answer: UpdateReply | None = None
        self.publisher = WeightPublisher(self.context.bulk_store, keep=settings.weights.keep)
        self.references = WeightPublisher(self.context.bulk_store, keep=1)

    def _make_trainer(self) -> Any:
        from cosmos_actor.trainer.ranks import RankedTrainer

        settings = self.context.settings
        return RankedTrainer(settings.policy, temperature=settings.rollout.logprob_temperature)

    def close(self) -> None:
        self.trainer.close()

    def weights_held(self) -> str:
        return str(self.step)

    @handles(SftRequest)
    def sft(self, request: SftRequest) -> UpdateReply:
        return self._once(request, lambda: self.trainer.sft_step(
            [(shown.prompt, shown.answer) for shown in request.demonstrations]))

    @handles(UpdateRequest)
    def update(self, request: UpdateRequest) -> UpdateReply:
        rewards = np.concatenate([group.rewards for group in request.groups])
        seen = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        return self._once(request, lambda: {**self.trainer.grpo_step(request.groups), **seen})

    def _once(self, request: Any, update: Callable[[], Mapping[str, float]]) -> UpdateReply:
        self.refuse_another_life(request.epoch)
        step = request.step
        if self.answer is not None and step == self.step:
            return self.answer
        if step != self.step + 1:
            raise OutOfStep(f"asked for step {step}, the policy is at step {self.step}")
        begun = self.context.clock.monotonic()
        metrics = update()
        self.step = step
        self.answer = UpdateReply(step, dict(metrics), self.context.clock.monotonic() - begun)
        return self.answer

    @handles(PublishRequest)
    def publish(self, request: PublishRequest) -> Published:
        """The weights after `request.step`. Raises OutOfStep when the policy is elsewhere."""
        self.refuse_another_life(request.epoch)
        if request.step != self.step:
            raise OutOfStep(f"asked to publish step {request.step}, the policy is at step {self.step}")
        return self._publish(self.publisher, request, self.trainer.weights)

    @handles(PublishReferenceRequest)
    def publish_reference(self, request: PublishReferenceRequest) -> Published:
        """The frozen reference: as it was first frozen in this run, or the present weights, frozen by this."""
        self.refuse_another_life(request.epoch)
        file = Path(request.directory) / REFERENCE_FILE
        return self._publish(self.references, request, lambda: self._reference(file))

    def _publish(self, publisher: WeightPublisher, request: Any,
                 tensors: Callable[[], Mapping[str, np.ndarray]]) -> Published:
        begun = self.context.clock.monotonic()
        version = Version(self.context.identity.run_id, request.epoch, request.step)
        manifest = publisher.publish(version, tensors())
        return Published(manifest, self.context.clock.monotonic() - begun)

    def _reference(self, path: Path) -> Mapping[str, np.ndarray]:
        if path.exists():
            return read_arrays(path, "put it back, or start a new run: another reference is another loss")
        tensors: Mapping[str, np.ndarray] = self.trainer.weights()
        write_arrays(path, tensors)
        return tensors

    @handles(SaveRequest)
    def save(self, request: SaveRequest) -> Saved:
        self.refuse_another_life(request.epoch)
        if request.step != self.step:
            raise OutOfStep(f"asked to save step {request.step}, the policy is at step {self.step}")
        with self.pause(f"checkpoint {request.step}"):
            self.trainer.save(Path(request.directory) / self.name)
        return Saved(self.name, request.step)

    @handles(RestoreRequest)
    def restore(self, request: RestoreRequest) -> Restored:
        self.begin_life(request.epoch)
        if request.directory is not None:
            with self.pause(f"checkpoint {request.step}"):
                self.trainer.load(Path(request.directory) / self.name)
        elif self.step != 0:
            self.trainer.reset()
        self.step, self.answer = request.step, None
        return Restored(self.name, self.step)
