"""What a task is to the roles: problems by number, demonstrations, and a verifier."""

from __future__ import annotations

from typing import Any, Protocol

from cosmos_actor.actors.loading import load_object


class Task(Protocol):
    """Problems that a program makes and judges. Every method is a pure function of its arguments and the settings."""

    def problem(self, split: str, index: int) -> tuple[str, Any]:
        """(prompt text, payload for the verifier) of problem `index` of "train" or "held_out"."""
        ...

    def answer(self, payload: Any) -> str:
        """The right answer's text, for demonstrations."""
        ...

    def reward(self, payload: Any, text: str) -> float:
        """The reward of an answer. Raises when it can not judge; never a 0 that means "I do not know"."""
        ...


def load_task(settings: Any, seed: int) -> Task:
    """The task that `data.task` names: one of the project's, or module:function taking (settings.data, seed)."""
    name = settings.data.task
    path = name if ":" in name else f"cosmos_actor.tasks.{name}:make_task"
    return load_object(path, setting="data.task")(settings.data, seed)  # type: ignore[no-any-return]
