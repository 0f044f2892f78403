"""The whole tree of a recipe's settings: one frozen object that every process of a run is made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import model_validator
from pydantic.fields import FieldInfo

from cosmos_actor.actors.settings import Settings, setting
from cosmos_actor.recipes.sections import (
    BulkSection,
    BusSection,
    CriticSection,
    DataSection,
    LimiterSection,
    PolicySection,
    ReferenceSection,
    ReplayBufferSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SupervisorSection,
    WeightsSection,
    field_notes,
)
from cosmos_actor.recipes.simulator_section import NODE, SimulatorSection
from cosmos_actor.roles.engines import engine_disagreements
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.weight_plane.transports.interface import TO_GPUS


class RunSettings(Settings):
    """Everything that decides a run. Two equal objects give the same numbers on the same machine."""

    run: RunSection = setting(RunSection, "the job as a whole")
    data: DataSection = setting(DataSection, "where the problems come from")
    rollout: RolloutSection = setting(RolloutSection, "who generates, and how tokens are sampled")
    reward: RewardSection = setting(RewardSection, "who scores")
    replay_buffer: ReplayBufferSection = setting(ReplayBufferSection, "the store between generation and training")
    limiter: LimiterSection = setting(LimiterSection, "how asking, storing and training keep pace")
    reference: ReferenceSection = setting(ReferenceSection, "the frozen model of the KL term")
    critic: CriticSection = setting(CriticSection, "who judges states, where it is not the policy itself")
    policy: PolicySection = setting(PolicySection, "the model that is trained, and how")
    sim: SimulatorSection = setting(SimulatorSection, "simulators, where they give the experience")
    control: ControlSettings = setting(ControlSettings, "the policy that acts in simulators, and how it is trained")
    weights: WeightsSection = setting(WeightsSection, "passing versions from policy to rollout")
    bus: BusSection = setting(BusSection, "the control plane")
    bulk: BulkSection = setting(BulkSection, "arrays by reference")
    supervisor: SupervisorSection = setting(SupervisorSection, "what happens when a process dies")

    @model_validator(mode="after")
    def _sections_agree(self) -> RunSettings:
        for line in disagreements(self):
            raise ValueError(line)
        return self

    @property
    def reference_count(self) -> int:
        """Reference actors to start: none while the KL term is off."""
        wanted = (self.policy.grpo if self.run.experience == "text" else self.control.ppo).kl_coefficient > 0
        return self.reference.count if wanted else 0

    @property
    def critic_count(self) -> int:
        """Critics to start: texts have none."""
        return self.critic.count if self.run.experience == "simulator" else 0


def disagreements(settings: RunSettings) -> Iterator[str]:
    """One line for each pair of settings that can not go together, naming both."""
    if settings.run.experience == "simulator":
        yield from _simulator_disagreements(settings)
    else:
        yield from engine_disagreements(settings)
    simulated = settings.run.experience == "simulator"
    name = "control.ppo" if simulated else "policy.grpo"
    kl = settings.control.ppo.kl_coefficient if simulated else settings.policy.grpo.kl_coefficient
    if kl > 0 and settings.reference.count == 0:
        yield f"{name}.kl_coefficient = {kl} needs reference.count >= 1, or 0 to do without a reference"
    yield from _weights_disagreements(settings)
    fewest, groups = settings.limiter.min_groups, settings.data.prompts_per_step
    if fewest > groups:
        yield f"limiter.min_groups = {fewest} is over data.prompts_per_step = {groups}"
    ahead, staleness = settings.limiter.ahead or 0, settings.run.max_staleness
    if ahead > staleness:
        yield f"limiter.ahead = {ahead} is over run.max_staleness = {staleness}: all of it would be too old"
    first, most = settings.supervisor.back_off_first_s, settings.supervisor.back_off_most_s
    if first > most:
        yield f"supervisor.back_off_first_s = {first} is over supervisor.back_off_most_s = {most}"


def _weights_disagreements(settings: RunSettings) -> Iterator[str]:
    wanted = settings.weights
    if wanted.transport == "directory" and not wanted.directory:
        yield "weights.transport = \"directory\" needs weights.directory, where versions are written"
    if wanted.delta == "always" and wanted.transport == "directory":
        yield "weights.transport = \"directory\" always brings a version in full: weights.delta = \"auto\" or \"never\""
    if wanted.delta == "always" and wanted.keep < 2:
        yield (f"weights.delta = \"always\" compares with the version before, and weights.keep = {wanted.keep} frees it"
               " first: 2 or more")
    if wanted.transport in TO_GPUS:
        yield from _gpu_disagreements(settings, f"weights.transport = \"{wanted.transport}\"")


def _gpu_disagreements(settings: RunSettings, said: str) -> Iterator[str]:
    """Of a transport that goes from GPU to GPU."""
    nccl = settings.weights.transport == "nccl"
    if settings.run.experience == "simulator":
        yield f"{said} is for language models: name another for run.experience = \"simulator\""
    elif nccl and settings.run.placement == "colocated":
        yield f"{said} reaches another GPU: it needs run.placement = \"disaggregated\"; on one GPU there is cuda_ipc"
    elif not nccl and settings.run.placement == "disaggregated":
        yield f"{said} stays on one GPU: it needs run.placement = \"colocated\"; to another GPU there is nccl"
    elif not nccl and settings.policy.ranks > 1 and settings.rollout.count > 1:
        yield (f"{said} stays on one GPU, that of the policy's first rank, and rollout.count = "
               f"{settings.rollout.count} are on several: \"auto\"")
    if settings.run.grouping == "single":
        yield f"{said} is between two processes: it needs run.grouping = \"per_role\""
    if settings.weights.delta == "always":
        yield f"{said} always brings a version in full: weights.delta = \"auto\" or \"never\""
    for role in ("policy", "rollout"):
        if getattr(settings, role).device == "cpu":
            yield f"{said} needs a GPU at both ends, and {role}.device = \"cpu\""


def _simulator_disagreements(settings: RunSettings) -> Iterator[str]:
    sim, steps = settings.sim, settings.sim.fragment_steps * settings.data.prompts_per_step
    if sim.count > 0 and not sim.kind:
        yield f"sim.count = {sim.count} needs sim.kind, such as gymnasium:CartPole-v1"
    if 0 < sim.count < settings.rollout.count:
        yield (f"sim.count = {sim.count} is under rollout.count = {settings.rollout.count}: a rollout without a "
               "simulator collects nothing; 0 for simulators that all come by `attach`")
    if bool(sim.nodes) != any(NODE in word for word in sim.through):
        yield ("sim.nodes and {node} in sim.through need each other: sim.through = [\"ssh\", \"{node}\"] with "
               "sim.nodes = [\"node7\", \"node8\"]")
    if steps < settings.control.ppo.mini_batches:
        yield (f"data.prompts_per_step x sim.fragment_steps = {steps} is under control.ppo.mini_batches = "
               f"{settings.control.ppo.mini_batches}")
    if settings.critic.count and settings.control.ppo.estimator == "vtrace":
        yield ("control.ppo.estimator = \"vtrace\" needs values of the model that is trained, and critic.count = 1 has "
               "them elsewhere: make it 0, or use \"gae\"")
    if settings.policy.sft_steps and not settings.control.cloning.demonstrations:
        yield f"policy.sft_steps = {settings.policy.sft_steps} needs control.cloning.demonstrations, a folder of them"
    if settings.policy.ranks > 1:
        yield f"policy.ranks = {settings.policy.ranks}: a control policy is trained by one rank"
    if settings.policy.lora.rank:
        yield f"policy.lora.rank = {settings.policy.lora.rank}: a control policy is trained whole, without an adapter"


def section_of(field: FieldInfo) -> type[Settings] | None:
    """The settings class behind a field, or None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def is_free_table(field: FieldInfo) -> bool:
    """True for a table whose keys are somebody else's (environment variables, a data set's own settings)."""
    return getattr(field.annotation, "__origin__", None) is dict


def accepts_text(field: FieldInfo) -> bool:
    """True for text, or text or nothing; not for a table or list of texts."""
    return field.annotation is str or (str in get_args(field.annotation) and get_origin(field.annotation) not in (
        dict, tuple))


def fields(model: type[Settings] = RunSettings, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every value, in the order of declaration; sections themselves are not listed."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from fields(section, f"{prefix}{name}.")


def values(settings: Settings) -> Mapping[str, Any]:
    """Dotted path -> value of every field."""
    flat: dict[str, Any] = {}
    for path, _ in fields(type(settings)):
        value: Any = settings
        for name in path.split("."):
            value = getattr(value, name)
        flat[path] = value
    return flat


def resumable_names() -> frozenset[str]:
    """Settings that a resumed run may change: they decide where and how safely it runs, not what it computes."""
    return frozenset(path for path, field in fields() if field_notes(field)[1])


def digest(settings: RunSettings) -> str:
    """Hex SHA-256 of all settings but the resumable ones: equal digests, the same computation."""
    kept = resumable_names()
    fixed = {path: value for path, value in values(settings).items() if path not in kept}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
