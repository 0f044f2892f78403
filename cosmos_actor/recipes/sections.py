"""The sections of a recipe's settings, one class a section. Policy and sampling come from their owners.

Units: seconds (`_s`), bytes (`_bytes`), steps, tokens, groups (one prompt with its samples). Importable without torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from cosmos_actor.actors.restart_policy import RestartLimits
from cosmos_actor.actors.settings import Settings, setting
from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.errors import BusError
from cosmos_actor.bus.faults import Faults
from cosmos_actor.bus.limits import Limits
from cosmos_actor.recipes.engine_section import EngineSection
from cosmos_actor.recipes.mirror import as_dataclass, section_of_dataclass
from cosmos_actor.recipes.process_settings import ComputeSettings, NonNegativeInt, PlainValue, ProcessSettings
from cosmos_actor.roles.engine import OnNewWeights
from cosmos_actor.roles.engines import EngineName
from cosmos_actor.roles.sampling import SamplingSettings
from cosmos_actor.trainer.settings import TrainerSettings

MEBIBYTE = 1 << 20
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
"""What every random generator of the run takes."""


class RunSection(Settings):
    """The job as a whole."""

    name: str = setting("", "what the run is called; names the default run directory", pattern=r"^[A-Za-z0-9._-]*$")
    loop: str = setting(
        "grpo", "the recipe's loop: a module of cosmos_actor.recipes, or package.module:function of one's own",
        pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")
    experience: Literal["text", "simulator"] = setting(
        "text", "what the policy learns from: texts that it writes, or episodes of simulators (sections sim, control)")
    seed: Seed = setting(0, "every random stream of the run is derived from it")
    steps: PositiveInt = setting(100, "policy updates after the SFT phase", unit="steps", resumable=True)
    run_dir: str = setting(
        "", "path; where everything of the run is written, empty = runs/<name>-<n>", resumable=True)
    max_staleness: NonNegativeInt = setting(
        0, "weight version at training minus version at dispatch never exceeds it; 0 = generate, then train; "
        "more overlaps the two at the price of older samples", unit="steps")
    checkpoint_every: PositiveInt = setting(
        25, "a killed policy or controller loses at most so much work", unit="steps", resumable=True)
    keep_last: PositiveInt = setting(2, "older checkpoints are deleted to bound the disk", unit="checkpoints",
                                     resumable=True)
    deadline_s: PositiveFloat = setting(
        300.0, "the longest the loop waits for any one answer before it stops and names whom it waited for",
        unit="s", resumable=True)
    eval_every: NonNegativeInt = setting(
        0, "greedy accuracy on held-out problems every so many steps and at both ends; 0 = never", unit="steps")
    grouping: Literal["per_role", "single"] = setting(
        "per_role", "which roles share a process: every actor its own, or all in one")
    placement: Literal["colocated", "disaggregated"] = setting(
        "colocated", "which roles share devices: rollout on the policy's devices, or on its own")
    colocated_offload: bool = setting(True, "policy and rollouts of one GPU have its memory in turn; false = both stay "
                                      "there, which must fit; nothing without a GPU or for simulators", resumable=True)


class ArithmeticProblems(Settings):
    """Sums of two numbers, generated and verifiable."""

    largest: PositiveInt = setting(19, "largest operand; with a small model it sets how hard the task is")


class ReasoningGymProblems(Settings):
    """A data set of the package reasoning-gym, which also scores the answers."""

    dataset: str = setting("chain_sum", "name of a reasoning-gym data set")
    config: dict[str, PlainValue] = setting({}, "passed to the data set; its own names and units")
    instruction: str = setting(
        "Answer with the number only.", "added to each question, so that the score reads the model's answer format")


class DataSection(ProcessSettings):
    """Where the problems come from."""

    task: str = setting(
        "arithmetic", "who makes and judges the problems: arithmetic, reasoning_gym, or package.module:function of "
        "one's own", pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")
    prompts_per_step: PositiveInt = setting(
        32, "prompts a step; more make the gradient steadier and the step longer", unit="groups")
    eval_problems: PositiveInt = setting(200, "held-out problems of one evaluation", unit="problems")
    arithmetic: ArithmeticProblems = setting(ArithmeticProblems, "used when data.task = \"arithmetic\"")
    reasoning_gym: ReasoningGymProblems = setting(ReasoningGymProblems, "used when data.task = \"reasoning_gym\"")


class RolloutProcesses(ComputeSettings):
    """How many actors generate, by what, and in what portions."""

    engine: EngineName = setting(
        "torch", "who computes the answers of a language model: torch, built in, or vllm, which lives in an "
        "environment of its own, named by `python`")
    tensor_parallel: PositiveInt = setting(
        1, "processes that share one model, each with a part of every layer and `threads` of its own, where rollout."
        "engine = \"vllm\"; for a model that one processor is too slow for, or one memory too small", unit="processes")
    count: NonNegativeInt = setting(
        1, "actors that the supervisor starts on this host; 0 = all of them join by `start`", unit="actors")
    min_actors: PositiveInt = setting(
        1, "the loop begins when so many are there, local or joined; fewer than that for run.deadline_s ends the job",
        unit="actors", resumable=True)
    samples_per_prompt: Annotated[int, Field(ge=2)] = setting(
        16, "samples of one prompt; the advantage compares them with each other, so one alone teaches nothing",
        unit="samples")
    chunk_prompts: PositiveInt = setting(
        8, "prompts in one work item, which is one fixed batch: part of the numbers, whoever computes it; "
        "smaller spreads better over actors, larger batches better", unit="groups")
    on_new_weights: OnNewWeights = setting(
        "wait", "what becomes of texts under way when a version comes: wait = it comes after them; the others go on "
        "with it at once, every token telling its version: recompute = all that they were is read anew; abort = the "
        "same as new requests; keep = nothing is read anew, and log-probs are then those of no version")
    sleep_level: Literal[1, 2] = setting(2, "where an engine's weights are outside of its turn: 1 = on the host; 2 = "
                                         "nowhere, the newest version is taken again in the next", resumable=True)
    probe_s: PositiveFloat = setting(
        300.0, "an engine that has not computed a token for so long after it took new weights (compiling included) is "
        "killed, and started anew", unit="s", resumable=True)


class RolloutSection(RolloutProcesses, EngineSection, SamplingSettings):
    """Who generates, and how tokens are sampled."""


class PolicySection(TrainerSettings, ComputeSettings):
    """The model that is trained, and how."""

    sft_steps: NonNegativeInt = setting(
        0, "supervised updates before the first reward, for a model that knows nothing yet", unit="steps")
    sft_batch: PositiveInt = setting(64, "demonstrations of one supervised update", unit="demonstrations")


class RewardSection(ProcessSettings):
    """Who scores."""

    count: PositiveInt = setting(1, "actors that score side by side; more for graders that are slow", unit="actors")
    deadline_s: PositiveFloat = setting(
        30.0, "a grader that has not answered by then is a typed error, never a score of 0", unit="s", resumable=True)


class ReplayBufferSection(ProcessSettings):
    """The store of experience between generation and training."""

    budget_bytes: PositiveInt = setting(
        256 * MEBIBYTE, "past it the job ends: a buffer without a bound hides a policy that can not keep up",
        unit="bytes", resumable=True)


class LimiterSection(Settings):
    """How asking, storing and training keep pace: what may be waited for, for how long, and what gives way."""

    ahead: NonNegativeInt | None = setting(
        None, "steps that samples are asked for ahead, at most run.max_staleness, which it is when unset; fewer leave "
        "room for groups that come late", unit="steps")
    samples_per_insert: Annotated[float, Field(gt=0, le=1)] = setting(
        1.0, "groups trained for each group asked for; below 1 asks for more prompts than a step trains and takes the "
        "first that come, so that stragglers hold nobody up")
    min_groups: PositiveInt = setting(
        1, "fewest groups that a step is trained with; with fewer it waits, and the job ends when no other is under "
        "way", unit="groups")
    at_bound: Literal["pace", "wait", "drop"] = setting(
        "pace", "what gives way before a group that is late would grow older than run.max_staleness: pace = the "
        "asking (nothing new while it may still be trained), wait = the training (until it is there), drop = the group")
    straggler_s: NonNegativeFloat = setting(
        0.0, "how long a step waits for its last groups, from when it waits for nothing else; 0 = as long as "
        "run.deadline_s", unit="s")
    straggler: Literal["short", "redispatch", "drop"] = setting(
        "short", "then: train without them, and with them later if they are fresh enough then; ask another actor as "
        "well, the first answer counts; or give them up")
    shortfall: Literal["replace", "short"] = setting(
        "replace", "groups that will not come (given up, in quarantine, too old): ask for new prompts in their place, "
        "at most as many as a step has, or train without")


class ReferenceSection(ComputeSettings):
    """The frozen model the KL term compares with; started only when policy.grpo.kl_coefficient > 0."""

    count: NonNegativeInt = setting(1, "actors that score side by side, each with a model of its own", unit="actors")


class CriticSection(ComputeSettings):
    """A critic in a process of its own, where simulators give the experience; otherwise it is a part of the policy."""

    count: Annotated[int, Field(ge=0, le=1)] = setting(0, "1 = the values come from a role of their own", unit="actors")


class WeightsSection(Settings):
    """Passing versions from the policy to the rollout actors."""

    keep: PositiveInt = setting(
        2, "published versions kept; with 1 a pull that began just before a publish fails and begins again",
        unit="versions", resumable=True)
    deadline_s: PositiveFloat = setting(
        60.0, "the longest one pull, or the wait for a version, may take before the job ends and names it", unit="s",
        resumable=True)
    fan_out: Literal["auto", "never"] = setting(
        "auto", "auto = rollouts that are not on the policy's host pass the weights on to each other, so that it sends "
        "about one copy however many they are; never = each takes a copy from the policy", resumable=True)
    delta: Literal["auto", "never", "always"] = setting(
        "auto", "auto = who is not on the policy's host takes what changed since the version that it holds, lossless; "
        "on one host a whole copy is faster; never, always = in spite of that. Costs such a rollout the memory of one "
        "more model as published, and pays with publish_dtype = bfloat16", resumable=True)
    patience_s: PositiveFloat = setting(
        3.0, "a rollout that is to pass weights on, and from which nothing comes for so long, is not waited for; by "
        "itself longer on a network where buckets take longer", unit="s", resumable=True)
    transport: Literal["auto", "shm", "stream", "directory", "nccl", "cuda_ipc"] = setting(
        "auto", "how the bytes come: auto = from GPU to GPU where policy and rollouts are all on GPUs of this host, "
        "else shared memory on the policy's host and streams to others; each by name, which is refused where it can "
        "not serve; directory = through weights.directory; nccl = to another GPU; cuda_ipc = within one GPU",
        resumable=True)
    protection: Literal["encrypted", "authenticated", "trusted"] = setting(
        "encrypted", "of streams: encrypted = CURVE; authenticated = plain TCP, to be read by the network but not "
        "changed; trusted = plain TCP at its full rate: accidents are found before the swap, by the digest of each "
        "tensor, and nobody on that network may be hostile", resumable=True)
    streams: Annotated[int, Field(ge=1, le=64)] = setting(
        4, "plain TCP connections that one rollout fetches by at a time", unit="streams", resumable=True)
    directory: str = setting(
        "", "path, file:// or any URL that fsspec opens: each version is also written there, as safetensors, before it "
        "is announced; the last weights.keep stay; empty = nowhere", resumable=True)


class _Listening(Settings):
    """The control plane: where the head listens, and every number of the bus."""

    host: str = setting("127.0.0.1", "address to listen at; another than loopback lets actors of other hosts in "
                        "(CURVE keys are asked for everywhere)", resumable=True)
    port: Annotated[int, Field(ge=0, le=65535)] = setting(
        0, "port of the head; 0 = any free one, announced in the run directory", resumable=True)
    faults: str = setting(
        "", "a bad network on purpose: drop, dup, reorder and corrupt with a probability, delay with a time, "
        "partition=ROLE:TIME@START, joined by commas; empty: none", resumable=True)

    @field_validator("faults")
    @classmethod
    def _known_faults(cls, text: str) -> str:
        try:
            Faults.parse(text)
        except BusError as error:
            raise ValueError(str(error)) from error
        return text


BusSection = section_of_dataclass(Limits, "BusSection", base=_Listening)


BulkSection = section_of_dataclass(BulkSettings, "BulkSection")


class SupervisorSection(Settings):
    """What happens when a process dies. The limits have the names of actors.restart_policy.RestartLimits."""

    strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] = setting(
        "one_for_one", "who is restarted with a dead actor", resumable=True)
    intensity: NonNegativeInt = setting(
        10, "more restarts than this within period_s end the job: something is wrong that a restart does not mend",
        unit="restarts", resumable=True)
    period_s: PositiveFloat = setting(120.0, "window in which restarts are counted", unit="s", resumable=True)
    back_off_first_s: PositiveFloat = setting(
        0.5, "pause before the second restart of an actor within the period; doubled each time", unit="s",
        resumable=True)
    back_off_most_s: PositiveFloat = setting(
        15.0, "longest pause, so that a person who mended the cause need not wait long", unit="s", resumable=True)
    stop_s: PositiveFloat = setting(
        30.0, "whole stop of a job; whoever is left then is killed", unit="s", resumable=True)
    start_s: PositiveFloat = setting(
        120.0, "an actor that has not said it is ready by then is killed and counted as failed", unit="s",
        resumable=True)
    shutdown_s: PositiveFloat = setting(5.0, "time between SIGTERM and SIGKILL of one actor", unit="s", resumable=True)
    poison_deaths: Annotated[int, Field(ge=2)] = setting(
        2, "a message that so many processes died of goes into quarantine with its payload; above 2 for runs whose "
        "processes are killed from outside all the time", unit="deaths", resumable=True)
    drain_s: PositiveFloat = setting(
        60.0, "a job that is asked to stop may take so long to finish and save the step in hand", unit="s",
        resumable=True)
    heartbeat_s: Annotated[float, Field(ge=3)] = setting(
        60.0, "an actor whose working loop gives no heartbeat for so long is killed", unit="s", resumable=True)
    stuck_s: Annotated[float, Field(ge=1)] = setting(
        2.5, "a process that is silent for so long, or a computation without progress and use of a CPU, is reported as "
        "stuck; below 2 a loaded machine is", unit="s", resumable=True)
    on_stuck: Literal["report", "kill"] = setting(
        "report", "an actor that computes for heartbeat_s without progress and without having declared a pause is only "
        "reported, or killed: for roles whose computations are short or say how they get on", resumable=True)
    no_progress_s: PositiveFloat = setting(
        120.0, "when no actor has got anything done for so long, the Python stacks of all are written into the run "
        "directory, once", unit="s", resumable=True)

    def limits(self) -> RestartLimits:
        return as_dataclass(self, RestartLimits)


def field_notes(field: Any) -> tuple[str, bool]:
    """(unit, may a resumed run change it) of a field; fields of other owners may have said neither."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return str(extra.get("unit", "")), bool(extra.get("resumable", False))
