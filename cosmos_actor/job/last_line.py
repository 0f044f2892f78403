"""How a process of a run ends: whatever it was is one line on stderr, the last in its log, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from cosmos_actor.actors.disk import refusal
from cosmos_actor.actors.errors import UserError
from cosmos_actor.bus import BusError, KeyFileError
from cosmos_actor.bus.errors import DescriptorLimit, NoSharedMemory

FAILED, MISTAKE = 1, 2
"""Exit codes: it may go well another time; only a person can put it right."""
MISTAKES = (UserError, KeyFileError, DescriptorLimit, NoSharedMemory)
"""What a person can put right, and no further life would."""


def exit_code_of(life: Callable[[], int]) -> int:
    """The exit code of `life`, also when it ends with a known error. A fault of the program itself is raised."""
    try:
        return life()
    except (UserError, BusError) as error:
        return _say(error, MISTAKE if isinstance(error, MISTAKES) else FAILED)
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        return _say(refused, MISTAKE)


def _say(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code
