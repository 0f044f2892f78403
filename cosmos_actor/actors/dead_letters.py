"""Work that nobody will do, with its reason, and the payload of what kills its consumers.

    RUN/dead_letters.jsonl            one object for each piece of work that was given up
    RUN/quarantine/NAME.msgpack       a message that killed its consumers: [format, head, [array bytes, ...]], where
                                      head and arrays are the bus's own encoding of it (`bus.schema.encode`)
    RUN/quarantine/NAME.json          what it was, and whom it killed

Guarantee: a file of the quarantine is whole, and reads back as the message that it was, arrays in the place of
references; nothing in it is executed by reading it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.actors.json_lines import JsonLinesWriter, read_json_lines
from cosmos_actor.actors.poison import Victim
from cosmos_actor.actors.run_directory import RunPaths, write_whole
from cosmos_actor.bus import BusError, DeadlineExceeded, MessageTooLarge, RemoteError, SchemaError
from cosmos_actor.bus.schema import decode, encode, from_plain, pack, schema_key, to_plain, unpack

FORMAT = 1
FETCH_DEADLINE_S = 10.0
"""How long the arrays of a message that goes into quarantine may take; whoever holds them may be gone as well."""

NO_CONSUMER, DEADLINE, RETRIES, SCHEMA, SIZE, FAILED, QUARANTINED = (
    "no consumer", "deadline", "retries over", "schema refused", "too large", "failed", "quarantined")
"""Kinds of dead letters. `failed`: its consumer took it and raised."""
NOBODY_SERVES = "nobody serves"
"""How a peer answers a message that it has no handler for."""


def letters_of(paths: RunPaths) -> Path:
    return paths.root / "dead_letters.jsonl"


def quarantine_of(paths: RunPaths) -> Path:
    return paths.root / "quarantine"


class Poison(BusError):
    """A message killed every consumer that took it, and is in quarantine."""


@dataclass(frozen=True)
class DeadLetter:
    """One piece of work that was given up."""

    kind: str
    reason: str
    role: str
    what: str
    """As the job calls it: "32 prompts of step 7"."""
    message: str
    """Schema and version."""
    groups: tuple[str, ...] = ()
    killed: tuple[Victim, ...] = ()
    quarantine: str | None = None
    """Name of the message in the quarantine."""


def letter(error: BusError, message: Any, *, role: str, what: str, present: int) -> DeadLetter:
    """The letter for `message`, which ended in `error` while `present` members of `role` were there."""
    name, version, _ = schema_key(message)
    return DeadLetter(_kind(error, present), str(error), role, what, f"{name}/{version}", groups_of(message))


def _kind(error: BusError, present: int) -> str:
    if isinstance(error, DeadlineExceeded):
        return DEADLINE if present else NO_CONSUMER
    if isinstance(error, RemoteError):
        return NO_CONSUMER if error.remote_text.startswith(NOBODY_SERVES) else FAILED
    if isinstance(error, SchemaError):
        return SCHEMA
    return SIZE if isinstance(error, MessageTooLarge) else RETRIES


def groups_of(message: Any) -> tuple[str, ...]:
    """Names of the trajectory groups that a message is about."""
    items = getattr(message, "groups", None) or getattr(message, "tasks", None)
    return tuple(item.group_id for item in items) if isinstance(items, list) else ()


# ---- writing


class DeadLetters:
    """Writes a run's dead letters. One process of a run does."""

    def __init__(self, paths: RunPaths, wall: Callable[[], float]) -> None:
        self._paths, self._wall = paths, wall
        self._count = len(list(quarantine_of(paths).glob("*.json")))

    def add(self, dead: DeadLetter) -> None:
        writer = JsonLinesWriter(letters_of(self._paths))
        writer.append({"time": self._wall(), **asdict(dead)})
        writer.close()

    async def quarantine(self, message: Any, bus: Any, *, role: str, what: str, killed: Sequence[Victim]) -> Poison:
        """Keep `message` whole, list it, and return the error that says so."""
        name, version, fingerprint = schema_key(message)
        self._count += 1
        place = f"{self._count:04d}-{role}-{name}"
        whom = "; ".join(f"{victim.actor}: {victim.reason}" for victim in killed)
        reason = f"{what} killed {len(killed)} actors of role {role} ({whom}), and is in quarantine as {place}"
        dead = DeadLetter(QUARANTINED, reason, role, what, f"{name}/{version}", groups_of(message), tuple(killed),
                          quarantine=place)
        folder = quarantine_of(self._paths)
        folder.mkdir(exist_ok=True)
        problem = await self._keep(message, bus, folder / f"{place}.msgpack")
        write_whole(folder / f"{place}.json", json.dumps({
            "format": FORMAT, "time": self._wall(), **asdict(dead), "schema": [name, version, fingerprint],
            "payload": None if problem else f"{place}.msgpack", "problem": problem}, indent=1) + "\n")
        self.add(dead)
        return Poison(reason, setting="supervisor.poison_deaths")

    async def _keep(self, message: Any, bus: Any, path: Path) -> str | None:
        """Write the message to `path`; why that could not be done, if so."""
        try:
            head, buffers = encode(await whole(message, bus))
            write_whole(path, pack([FORMAT, head, [bytes(buffer) for buffer in buffers]]), durable=True)
        except (BusError, OSError) as error:
            return f"the payload is not kept: {error}"
        return None


async def whole(message: Any, bus: Any) -> Any:
    """The message with arrays in the place of references. Raises BulkGone when their holder is gone."""
    references = to_plain(message)[2].references
    if not references:
        return message
    arrays = [await bus.bulk_reader.fetch(reference, deadline_s=FETCH_DEADLINE_S) for reference in references]
    head, buffers = encode(message)
    name, version, fingerprint, plain = unpack(head)
    return from_plain((name, version, fingerprint), plain, buffers, arrays)[0]


# ---- reading


def read_dead_letters(paths: RunPaths) -> list[dict[str, Any]]:
    """Every dead letter of a run, oldest first, as JSON objects; also while it is running."""
    return read_json_lines(letters_of(paths))


def read_quarantined(path: Path | str) -> Any:
    """The message in a file of the quarantine. Modules that declare its schema must have been imported.

    Raises NotFound for a missing or damaged file, SchemaError for a schema that is unknown or another one by now.
    """
    try:
        form, head, buffers = unpack(Path(path).read_bytes())
        if form != FORMAT:
            raise ValueError(f"format {form}, this version reads format {FORMAT}")
        return decode(head, buffers)
    except (OSError, ValueError, TypeError) as error:
        raise NotFound(f"{path} can not be read as a quarantined message: {error}") from error
