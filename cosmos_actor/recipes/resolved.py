"""`config.resolved.toml`: settings as a file that reloads equal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.recipes.layers import Layer, layer_of_flag, parse_toml, resolve_layers
from cosmos_actor.recipes.settings import RunSettings, digest


def resolved_text(settings: RunSettings) -> str:
    """TOML that `load_resolved` turns into an equal object. Unset values are left out: unset is their default."""
    import tomlkit  # every actor reads this file, only `up` writes it

    document = tomlkit.document()
    document.add(tomlkit.comment(f"settings as resolved; digest {digest(settings)}"))
    for name, section in settings.model_dump(mode="json", exclude_none=True).items():
        document.add(name, tomlkit.item(_without_empty_tables(section)))
    return tomlkit.dumps(document)


def _without_empty_tables(section: dict[str, Any]) -> dict[str, Any]:
    """Every free table is empty by default, so leaving an empty one out changes nothing."""
    kept = {name: _without_empty_tables(value) if isinstance(value, dict) else value for name, value in section.items()}
    return {name: value for name, value in kept.items() if value != {}}


def load_text(text: str, origin: str, flags: Iterable[str] = ()) -> RunSettings:
    """The inverse of `resolved_text`, with `--set` flags on top. `origin` is named in errors."""
    return resolve_layers([Layer(origin, parse_toml(text, origin)), *map(layer_of_flag, flags)])


def load_resolved(path: Path, flags: Iterable[str] = ()) -> RunSettings:
    """The settings of a `config.resolved.toml`, with `--set` flags on top."""
    return load_text(read_text(path), str(path), flags)


def read_text(path: Path) -> str:
    """A file's text. Raises NotFound with the path and the reason."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise NotFound(f"can not read {path}: {reason}") from error
