"""Reading a message of the quarantine back, with every message that a job sends known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cosmos_actor.roles.messages  # noqa: F401 - declares what a job sends
from cosmos_actor.actors.dead_letters import read_quarantined


def load_quarantined(path: Path | str) -> Any:
    """The message in RUN/quarantine/NAME.msgpack, arrays included: what its consumers got when they died.

    Raises NotFound for a file that is missing or damaged, SchemaError where this version declares another message.
    """
    return read_quarantined(path)
