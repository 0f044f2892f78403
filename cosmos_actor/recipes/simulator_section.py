"""The section `sim` of a recipe's settings. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from cosmos_actor.actors.settings import setting
from cosmos_actor.recipes.process_settings import NonNegativeInt, PlainValue, ProcessSettings

PLUG_IN = r"^[A-Za-z_][\w.-]*(:[A-Za-z_][\w.]*)?$"
"""The name of an entry point, or package.module:attribute."""
NODE = "{node}"


class SimulatorSection(ProcessSettings):
    """The simulators that rollouts drive, when run.experience = "simulator"."""

    kind: str = setting(
        "", "KIND:ID that simulators must be, such as gymnasium:CartPole-v1; empty = as the first that attaches")
    count: NonNegativeInt = setting(
        0, "processes that the supervisor starts, with `python`, on this host or through `through`; 0 = all of them "
        "come by `attach`", unit="processes", resumable=True)
    through: tuple[str, ...] = setting(
        (), "words before `python` that start it elsewhere, such as [\"ssh\", \"-oBatchMode=yes\", \"{node}\"]; "
        "`python` is a path there; empty = on this host", strict=False, resumable=True)
    nodes: tuple[str, ...] = setting(
        (), "what {node} in `through` stands for, in turn from one simulator to the next", strict=False, resumable=True)
    envs: PositiveInt = setting(1, "worlds in each process that the supervisor starts", unit="slots", resumable=True)
    options: dict[str, PlainValue] = setting({}, "passed to the simulator that the supervisor starts")
    max_memory_mb: NonNegativeInt = setting(
        0, "one that the supervisor starts leaves when its process holds more, and is started anew; its episodes are "
        "given to others; 0 = however much", unit="MB", resumable=True)
    port: Annotated[int, Field(ge=0, le=65535)] = setting(
        0, "where simulators attach to the first rollout, the next rollout one higher; 0 = any free one, which `up` "
        "prints", resumable=True)
    tasks: tuple[str, ...] = setting((), "tasks to run, in turn; empty = all that the simulator has", strict=False)
    source: str = setting(
        "in_turn", "who makes the work units: in_turn, an entry point of the group cosmos_actor.sources, or "
        "package.module:function", pattern=PLUG_IN)
    driver: str = setting(
        "collector", "who collects fragments from the simulators of a rollout: collector, an entry point of the group "
        "cosmos_actor.drivers, or package.module:function", pattern=PLUG_IN)
    sinks: tuple[str, ...] = setting(
        (), "who else gets the record of each episode, beside episodes.jsonl: entry points of the group "
        "cosmos_actor.sinks, or package.module:function", strict=False, resumable=True)
    eval_trials: PositiveInt = setting(
        20, "episodes of each task in one evaluation, every run.eval_every steps; the same ones each time",
        unit="episodes")
    videos: NonNegativeInt = setting(
        1, "trials of each task that an evaluation films from the first on, with every step; 0 = none",
        unit="episodes", resumable=True)
    failed_videos: NonNegativeInt = setting(
        3, "further trials of each task that are kept as videos because they failed, with what the policy saw",
        unit="episodes", resumable=True)
    keep_videos: NonNegativeInt = setting(
        10, "the newest evaluations whose videos are kept; 0 = all", unit="evaluations", resumable=True)
    fragment_steps: PositiveInt = setting(
        128, "steps of one fragment; data.prompts_per_step of them make a training step", unit="steps")
    embodiment: str = setting("", "digest of the EmbodimentMap that simulators must have; empty = as the first has")
    reward_scale: float = setting(1.0, "the simulator's rewards are multiplied by it")
    reward_clip: NonNegativeFloat = setting(0.0, "then cut to ± this; 0 = not at all")
    step_s: PositiveFloat = setting(
        10.0, "a simulator that takes longer for a step hangs, and its work is given to another; an episode may end "
        "with it and the next begin, so reset_s is added", unit="s", resumable=True)
    reset_s: PositiveFloat = setting(60.0, "the same for a reset, which may load a scene", unit="s", resumable=True)
    resume_s: PositiveFloat = setting(
        5.0, "a simulator whose link is lost may come back for so long and go on where it was", unit="s",
        resumable=True)
    silent_s: Annotated[float, Field(ge=2)] = setting(
        5.0, "a simulator that gives no heartbeat for so long, and has declared no pause, loses its work to another; "
        "it may attach again; below 3 a loaded machine is silent", unit="s", resumable=True)
    squeeze: Literal["none", "zlib"] = setting(
        "none", "pictures of simulators on other hosts: zlib makes them two to fifty times smaller without loss, at "
        "some tens of MB/s of the simulator's time", resumable=True)
    attempts: PositiveInt = setting(
        3, "how often a work unit is tried when simulators fail; an error is never a reward", unit="attempts",
        resumable=True)
    most_given_up: NonNegativeInt = setting(
        16, "work units of one request that may fail all their attempts before the job ends", unit="units",
        resumable=True)
    lease_s: PositiveFloat = setting(
        120.0, "a work unit whose holder has not got on for so long is given to another", unit="s", resumable=True)
    max_wait_ms: NonNegativeFloat = setting(
        5.0, "how long the first simulator's observation waits for those of others, to be one forward pass", unit="ms",
        resumable=True)
    least_rows: NonNegativeInt = setting(
        0, "so many observations are enough for a forward pass, whoever else would come within max_wait_ms: the first "
        "M of N worlds, where simulators take unlike times for a step; 0 = it is for all", unit="rows", resumable=True)

    def launcher(self, index: int) -> tuple[str, ...]:
        """The words through which the supervisor's simulator `index` is started; none: on this host."""
        node = self.nodes[index % len(self.nodes)] if self.nodes else ""
        return tuple(word.replace(NODE, node) for word in self.through)
