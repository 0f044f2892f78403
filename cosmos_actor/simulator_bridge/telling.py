"""What an installation of a simulator can do, for people and for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .contract import DISCRETE, ActionSpec, ArraySpec, Description, TaskSpec
from .embodiment import EmbodimentMap

DIGEST_SHOWN = 12
"""Characters of an embodiment's digest: enough to see that two differ."""


def plain(description: Description, embodiment: Optional[EmbodimentMap]) -> Dict[str, Any]:
    """For JSON. `embodiment` is the map itself, or None; its digest is `embodiment_digest`."""
    told = asdict(description)
    told["embodiment_digest"] = told.pop("embodiment")
    told["embodiment"] = None if embodiment is None else embodiment.plain()
    return told


def description_of(told: Mapping[str, Any]) -> Description:
    """What `plain` was made of. Raises KeyError, TypeError or ValueError for what is none."""
    known = {part.name for part in fields(Description)}
    given = {name: value for name, value in told.items() if name in known}
    tuples = {name: tuple(told["action"][name]) for name in ("shape", "low", "high")}
    given.update(
        embodiment=told["embodiment_digest"], tasks=[TaskSpec(**task) for task in told["tasks"]],
        action=ActionSpec(**{**told["action"], **tuples}),
        observations={name: ArraySpec(**{**spec, "shape": tuple(spec["shape"])})
                      for name, spec in told["observations"].items()})
    return Description(**given)


def lines(description: Description, embodiment: Optional[EmbodimentMap]) -> List[str]:
    """For a person: a word, and what belongs to it, one below the other."""
    rows: List[Tuple[str, Sequence[str]]] = [
        ("simulator", [description.simulator]),
        ("tasks", [_task(task) for task in description.tasks]),
        ("observations", [_array(name, spec) for name, spec in description.observations.items()]),
        ("action", [_action(description.action)]),
        ("envs", ["1 to {} in one process".format(description.max_envs)]),
        ("deterministic", ["yes: same unit and actions, same observations" if description.deterministic else "no"]),
        ("expert", ["yes: `cosmos-actor sim record` writes demonstrations" if description.expert else "none"]),
        ("control rate", ["{:g} Hz".format(description.control_hz) if description.control_hz else "not told"]),
        ("embodiment", ["none"] if embodiment is None else _embodiment(embodiment)),
        ("libraries", ["{} {}".format(*item) for item in sorted(description.libraries.items())] or ["not told"]),
    ]
    return ["{:<14} {}".format(word if index == 0 else "", text)
            for word, texts in rows for index, text in enumerate(texts)]


def _task(task: TaskSpec) -> str:
    limit = "at most {} steps".format(task.max_steps) if task.max_steps else "no limit of steps"
    begins = "{} initial states".format(task.initial_states) if task.initial_states else "begins by seed"
    told = "; `{}`".format(" ".join(task.instruction.split())) if task.instruction else ""
    return "{}: {}, {}{}".format(task.name, limit, begins, told)


def _array(name: str, spec: ArraySpec) -> str:
    return "{}: {} {}{}".format(name, spec.dtype, list(spec.shape), "" if spec.finite else ", may be NaN or infinite")


def _action(spec: ActionSpec) -> str:
    if spec.kind == DISCRETE:
        return "{}: 0 to {}".format(spec.kind, spec.n - 1)
    return "{}: float32 {}, {}".format(spec.kind, list(spec.shape), _range(spec))


def _range(spec: ActionSpec) -> str:
    if not (spec.low or spec.high):
        return "without bounds"
    low, high = ("{:g}".format(bounds[0]) if len(set(bounds)) == 1 else "[{}]".format(
        ", ".join("{:g}".format(bound) for bound in bounds)) if bounds else "none" for bounds in (spec.low, spec.high))
    return "{} to {}".format(low, high)


def _embodiment(body: EmbodimentMap) -> List[str]:
    told = ["{}, digest {}".format(body.name, body.digest[:DIGEST_SHOWN])]
    told += ["camera {}: {} x {}, turned by {}".format(camera.name, camera.height, camera.width, camera.rotation)
             for camera in body.cameras]
    for word, parts in (("state", body.state), ("action", body.action)):
        if parts:
            told.append("{}: {}".format(word, ", ".join("{} {}".format(part.name, part.size) for part in parts)))
    return told
