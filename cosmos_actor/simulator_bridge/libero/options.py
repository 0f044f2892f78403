"""What stands behind the `?` of `libero:SUITE?…`. Pure."""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from ..mistakes import Mistake

CAMERAS = {"agent": "agentview", "wrist": "robot0_eye_in_hand"}
"""Name -> LIBERO's."""
LARGEST_SIZE = 1024


@dataclass(frozen=True)
class Options:
    """Each has a default."""

    tasks: Any = ()
    """Numbers of the suite's tasks: `0,3`, `[0, 3]` or `3`; none: all."""
    size: int = 128
    """Pixels of each side of a picture."""
    settle: int = 10
    """Actions that hold still before an episode."""
    shadows: bool = False
    """With them, and edges smoothed, pictures are LIBERO's own to the last bit and take twice the time."""
    max_steps: int = 0
    """0: the suite's."""
    cameras: Any = "agent,wrist"
    """Of `CAMERAS`, the first one first; empty: nothing is rendered at all."""
    keep: int = 2
    """Tasks whose environment each slot keeps; the one used longest ago is closed. Opening one takes 5 s."""

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        set_("tasks", numbers("tasks", self.tasks))
        set_("cameras", tuple(words(self.cameras)))
        for name, least, most in (("size", 16, LARGEST_SIZE), ("settle", 0, 1000), ("max_steps", 0, 10**6),
                                  ("keep", 1, 100)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise Mistake("libero: {}={}: expected a whole number from {} to {}".format(name, value, least, most))
        if type(self.shadows) is not bool:
            raise Mistake("libero: shadows={}: expected true or false".format(self.shadows))
        unknown = [name for name in self.cameras if name not in CAMERAS]
        if unknown or len(set(self.cameras)) < len(self.cameras):
            raise Mistake("libero: cameras={}: expected some of {}".format(
                ",".join(self.cameras), ",".join(CAMERAS)))

    @classmethod
    def read(cls, options: Dict[str, Any]) -> Options:
        """Raises Mistake."""
        unknown = sorted(set(options) - set(cls.__dataclass_fields__))
        if unknown:
            raise Mistake("libero has no option `{}`; there are {}".format(
                unknown[0], ", ".join(cls.__dataclass_fields__)))
        return cls(**options)


def words(given: Any) -> List[str]:
    """Of a list, or of a text with commas."""
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    return [str(part).strip() for part in parts if str(part).strip()]


def numbers(name: str, given: Any) -> Tuple[int, ...]:
    """Without the second of two that are the same. Raises Mistake."""
    found = words(given)
    if not all(word.isdigit() for word in found):
        raise Mistake("libero: {}={}: expected numbers such as 0,3".format(name, ",".join(found)))
    return tuple(OrderedDict.fromkeys(int(word) for word in found))
