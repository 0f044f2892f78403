"""Problems of the package reasoning-gym, by seed and index, judged by its own verifiers.

A fixed sixteenth of all questions, chosen by a hash of the question itself, is held out: "train" never draws one of
them and "held_out" draws nothing else, whatever the seed. Left out: partial credit. A reward is 1 or 0.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from cosmos_actor.actors.errors import BadValue, NotFound, UnknownName
from cosmos_actor.actors.seeds import seed_of

HELD_OUT_OF = 16
SPLITS = ("train", "held_out")
MAX_DRAWS = 1000
# A data set with fewer questions than this might have none in a split; draws without a bound would never end.
SIZE = 1 << 31
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class ReasoningGymTask:
    """Implements roles.task.Task. The same seed, split and index give the same question."""

    def __init__(self, dataset: str, config: dict[str, Any], instruction: str, seed: int) -> None:
        """Raises UnknownName for a data set that reasoning-gym lacks, BadValue for a configuration it refuses."""
        self.name, self.instruction, self.seed = dataset, instruction, seed
        self._dataset = _create(dataset, config)
        self._entry = lru_cache(maxsize=4096)(self._dataset.__getitem__)

    def problem(self, split: str, index: int) -> tuple[str, dict[str, Any]]:
        """(prompt, payload). The payload is the question's place in the data set, from which it is made again."""
        if split not in SPLITS:
            raise ValueError(f"a split is train or held_out, not {split!r}")
        for draw in range(MAX_DRAWS):
            place = seed_of(f"{self.seed}/{split}/{index}/{draw}", bits=64) % SIZE
            question = self._entry(place)["question"]
            if is_held_out(question) == (split == "held_out"):
                return f"{question} {self.instruction}".strip(), {"place": place}
        raise BadValue(f"{self.name} has no question in {split}: make its questions more varied",
                       setting="data.reasoning_gym.config")

    def answer(self, payload: Any) -> str:
        """The data set's own right answer."""
        return str(self._entry(payload["place"])["answer"])

    def reward(self, payload: Any, text: str) -> float:
        """1.0 where reasoning-gym gives its full score, otherwise 0.0.

        Where the right answer is a number, the last number of `text` is judged; elsewhere the whole text.
        """
        entry = self._entry(payload["place"])
        said = last_number(text) if NUMBER.fullmatch(str(entry["answer"])) else text.strip()
        return 1.0 if float(self._dataset.score_answer(said, entry)) >= 1.0 else 0.0


def last_number(text: str) -> str:
    """The last number that `text` says, as written; empty when it says none."""
    found = NUMBER.findall(text)
    return found[-1].rstrip(",") if found else ""


def is_held_out(question: str) -> bool:
    """Whether this question belongs to the held-out split."""
    return seed_of(question, bits=64) % HELD_OUT_OF == 0


def make_task(settings: Any, seed: int) -> ReasoningGymTask:
    """The task of `settings`, a data section."""
    chosen = settings.reasoning_gym
    return ReasoningGymTask(chosen.dataset, dict(chosen.config), chosen.instruction, seed)


def _create(name: str, config: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise NotFound(f"data.task = reasoning_gym needs `pip install reasoning-gym` ({error})") from error
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UnknownName(f"reasoning-gym has no data set {name!r}", setting="data.reasoning_gym.dataset")
    try:
        return reasoning_gym.create_dataset(name, seed=0, size=SIZE, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise BadValue(f"reasoning-gym's {name} refuses its configuration: {error}",
                       setting="data.reasoning_gym.config") from error
