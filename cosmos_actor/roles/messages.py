"""What the controller asks each role, and what it answers. Imports neither torch nor a model.

Legend: P tokens of a prompt, T tokens of a demonstration, N tokens of all samples of a group, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cosmos_actor.actors.experience import Group, Task
from cosmos_actor.actors.trajectory import GenerateTask
from cosmos_actor.bus.schema import Json, array, schema
from cosmos_actor.weight_plane.manifest import Manifest

WEIGHTS_TOPIC = "weights"
"""Newest version of the policy: rollouts follow it."""
REFERENCE_TOPIC = "reference_weights"
"""The frozen version that the KL term compares with: reference actors follow it."""


# ---- data


@schema("tasks_request", version=1)
@dataclass(frozen=True)
class TasksRequest:
    """Asks for the prompts of one step. The answer depends on (seed, step, split) alone, so it can be asked again."""

    step: int
    prompts: int
    samples: int
    split: str
    """"train", "held_out" for problems that training never sees, or "replacement" for what a step lost."""
    attempt: int


@schema("tasks", version=1)
@dataclass(frozen=True)
class Tasks:
    tasks: list[Task]


@schema("demonstrations_request", version=1)
@dataclass(frozen=True)
class DemonstrationsRequest:
    """Asks for the demonstrations of one SFT step."""

    step: int
    count: int


@schema("demonstration", version=1)
@dataclass(frozen=True)
class Demonstration:
    """A prompt and its right answer, as tokens; the answer ends with the stop token."""

    prompt: Any = array("int32", "P")
    answer: Any = array("int32", "T")


@schema("demonstrations", version=1)
@dataclass(frozen=True)
class Demonstrations:
    demonstrations: list[Demonstration]


# ---- rollout


@schema("generation_request", version=1)
@dataclass(frozen=True)
class GenerationRequest:
    """One fixed batch: sampled together, by one engine, whichever that is."""

    tasks: list[GenerateTask]
    version_dispatch: int
    """The newest published version when this was asked for: staleness counts from here."""
    min_ordinal: int
    """`Version.ordinal` that the engine waits for: it samples with this version or a newer one."""
    greedy: bool
    weights_deadline_s: float


@schema("generation", version=2)
@dataclass(frozen=True)
class Generation:
    groups: list[Group]
    seconds: float
    """Time that the engine computed."""
    tokens: int
    weights: dict[str, str]
    """Version -> digest, as the engine found it in what it held, of all weights that the groups were made with. What
    was made with others, or with a digest that was not published, is not trained on."""


@schema("weights_report", version=3)
@dataclass(frozen=True)
class WeightsReport:
    """A rollout says which weights it really holds; `problem` is empty unless a version could not be taken. A reference
    says only that."""

    actor: str
    epoch: int
    step: int
    digest: str
    problem: str
    topic: str = WEIGHTS_TOPIC
    """On which it was announced."""
    rounding: dict[str, float] = field(default_factory=dict)
    """How far an engine that computes with less went from what was sent: KIND/rms and KIND/max; see roles.quantised."""


@schema("weights_alarm", version=2)
@dataclass(frozen=True)
class WeightsAlarm:
    """An event: a version came damaged. Whoever says so acts with the one before, and fetches it again `left` times."""

    actor: str
    epoch: int
    step: int
    tensor: str
    problem: str
    left: int
    topic: str = WEIGHTS_TOPIC


@schema("ask_weights", version=1)
@dataclass(frozen=True)
class AskWeights:
    """Which weights do you hold, by a digest that you compute now?"""


@schema("weights_proof", version=1)
@dataclass(frozen=True)
class WeightsProof:
    """Read back from the engine now; of the policy: from what others pull. Both are empty when nothing is held."""

    version: str
    digest: str
    """By what is there now."""
    expected: str
    """What it was when it was taken, or published."""
    seconds: float


# ---- reward, reference


@schema("score_request", version=1)
@dataclass(frozen=True)
class ScoreRequest:
    groups: list[Group]


@schema("column", version=1)
@dataclass(frozen=True)
class Column:
    """One field of one group: [G] or [N] float32."""

    values: Any = array("float32", "X")


@schema("scores", version=1)
@dataclass(frozen=True)
class Scores:
    """One column a group, in the order of the request, and who wrote it."""

    columns: list[Column]
    writer: str
    seconds: float
    mean: float
    """Over all values: the controller never looks into an array."""


def scores_of(columns: Sequence[np.ndarray], writer: str, seconds: float) -> Scores:
    """The answer to a request whose groups have these values."""
    mean = float(np.mean(np.concatenate(columns))) if columns else 0.0
    return Scores([Column(values) for values in columns], writer, seconds, mean)


@schema("reference_request", version=1)
@dataclass(frozen=True)
class ReferenceRequest:
    """Asks for the log-probs of the sampled tokens under the frozen reference policy."""

    groups: list[Group]


# ---- replay buffer
#
# `epoch` is the life of the job that asks. A stateful role answers the life that restored it last and no other.


@schema("put_request", version=1)
@dataclass(frozen=True)
class PutRequest:
    epoch: int
    step: int
    """The step that these groups are meant for."""
    groups: list[Group]


@schema("put_reply", version=1)
@dataclass(frozen=True)
class PutReply:
    stored: int
    duplicates: int


@schema("sample_request", version=1)
@dataclass(frozen=True)
class SampleRequest:
    """Asks for `groups` groups to train at `version`; what is staler than `run.max_staleness` is dropped and named."""

    epoch: int
    groups: int
    version: int


@schema("sample", version=1)
@dataclass(frozen=True)
class Sample:
    """`groups` is empty when fewer than asked for are `present`."""

    groups: list[Group]
    dropped: dict[str, list[str]]
    """Reason -> "trajectory id@attempt" of what was too stale to train."""
    present: int


# ---- policy


@schema("sft_request", version=1)
@dataclass(frozen=True)
class SftRequest:
    """Step number `step` of the optimiser, on demonstrations. Asked twice, it is done once."""

    epoch: int
    step: int
    demonstrations: list[Demonstration]


@schema("update_request", version=1)
@dataclass(frozen=True)
class UpdateRequest:
    """Step number `step` of the optimiser, on scored groups. Asked twice, it is done once."""

    epoch: int
    step: int
    groups: list[Group]


@schema("update_reply", version=1)
@dataclass(frozen=True)
class UpdateReply:
    step: int
    metrics: Json
    seconds: float


@schema("publish_request", version=2)
@dataclass(frozen=True)
class PublishRequest:
    """Take a snapshot of the weights after `step` and publish it. Answered with Snapshotted once it is taken; a
    Published or NotPublished event follows, unless a newer snapshot takes its place."""

    epoch: int
    step: int


@schema("snapshotted", version=1)
@dataclass(frozen=True)
class Snapshotted:
    """The policy may go on training."""

    step: int
    seconds: float
    """What that took: all that a step waits for its publication."""
    replaced: int
    """Versions, in this life of the policy, that a newer one overtook before they were published."""


@schema("mend_request", version=2)
@dataclass(frozen=True)
class MendRequest:
    """Somebody found damaged bytes in the version of `step`: compare what others pull with the snapshot it came of, or
    with the file of the frozen reference."""

    epoch: int
    step: int
    topic: str = WEIGHTS_TOPIC


@schema("mended", version=1)
@dataclass(frozen=True)
class Mended:
    """The tensors that were damaged and are right again; none when nothing was, or when it can not be known."""

    tensors: list[str]


@schema("not_published", version=1)
@dataclass(frozen=True)
class NotPublished:
    """An event: a version could not be published. Whoever held an older one still does."""

    epoch: int
    step: int
    problem: str


@schema("publish_reference_request", version=1)
@dataclass(frozen=True)
class PublishReferenceRequest:
    """Freeze the policy as it is as the reference: keep it in `directory` and publish it for the rest of the run.

    When `directory` already holds a frozen reference, that one is published, so a resumed run compares with the same.
    """

    epoch: int
    step: int
    directory: str


@schema("published", version=1)
@dataclass(frozen=True)
class Published:
    """A version that can be pulled, as an event; of the reference, as an answer."""

    manifest: Manifest
    seconds: float


# ---- checkpoints, common to the stateful roles


@schema("save_request", version=1)
@dataclass(frozen=True)
class SaveRequest:
    """Write what this role holds below `directory`, so that RestoreRequest brings it back exactly."""

    directory: str
    epoch: int
    step: int


@schema("saved", version=1)
@dataclass(frozen=True)
class Saved:
    """Written, in files that carry their own check sums."""

    part: str
    step: int


@schema("restore_request", version=1)
@dataclass(frozen=True)
class RestoreRequest:
    """Become what `directory` holds, or what a fresh start holds when it is None."""

    directory: str | None
    epoch: int
    step: int


@schema("restored", version=1)
@dataclass(frozen=True)
class Restored:
    part: str
    step: int
