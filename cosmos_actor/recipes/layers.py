"""Layers of settings (packaged recipe, own file, `--set` flags), each with the place it came from. Pure.

Guarantee: whatever is wrong with a value, the error is one line that names the setting, the value and the layer.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cosmos_actor.actors.errors import BadValue, UnknownName
from cosmos_actor.recipes.settings import RunSettings, accepts_text, fields, is_free_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tree = dict[str, Any]
NOT_TOML = (ValueError, RecursionError)
"""How the parser refuses a text: TOMLDecodeError is a ValueError, and so is a number of too many digits."""


FLAG_SHOWN = 80
"""Characters of a flag in a message about it."""


@dataclass(frozen=True)
class Layer:
    """A part of a settings tree and its origin, as a person would name it ("my.toml", "--set policy.lr=…")."""

    origin: str
    tree: Tree


def parse_toml(text: str, origin: str) -> Tree:
    """The tables of a TOML text; a syntax error becomes one line with `origin` in it."""
    try:
        return tomllib.loads(text)
    except NOT_TOML as error:
        raise BadValue(f"{origin} is not valid TOML: {error}") from error


def layer_of_flag(flag: str) -> Layer:
    """`a.b=value` as a layer. The value is TOML, or else the bare text: `policy.model=/some/dir` needs no quotes.

    A setting that takes text gets the text as written, so that `run.name=7` is a name.
    """
    origin = f"--set {flag}" if len(flag) <= FLAG_SHOWN else f"--set {flag[:FLAG_SHOWN]}…"
    path, equals, text = flag.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or not all(names):
        raise BadValue(f"{origin}: expected NAME=VALUE, for example --set policy.lr=5e-4")
    value = _toml_value(text.strip())
    field = dict(fields()).get(".".join(names))
    if field is not None and accepts_text(field) and not isinstance(value, str):
        value = text.strip()
    for name in reversed(names):
        value = {name: value}
    return Layer(origin, value)


def _toml_value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except NOT_TOML:
        return text
    return document["value"] if set(document) == {"value"} else text


def resolve_layers(layers: Sequence[Layer]) -> RunSettings:
    """The settings of all layers together, later ones winning value by value."""
    tree: Tree = {}
    for layer in layers:
        for path in unknown_settings(layer.tree):
            raise UnknownName(f"unknown setting `{path}`{_nearest(path)} (from {layer.origin})", setting=path)
        _merge(tree, layer.tree)
    try:
        return RunSettings.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise _first_mistake(error, layers) from error


def unknown_settings(tree: Mapping[str, Any], known: Mapping[str, Any] | None = None,
                     prefix: str = "") -> Iterator[str]:
    """Dotted paths of `tree` that no settings class declares."""
    known = dict(fields()) if known is None else known
    for name, value in tree.items():
        path = prefix + name
        if path in known:
            continue
        if not any(other.startswith(f"{path}.") for other in known):
            yield path
        elif isinstance(value, Mapping):
            yield from unknown_settings(value, known, f"{path}.")


def _nearest(path: str) -> str:
    """`; did you mean …?`: nearest name in the same section, same name in another, nearest path, nearest section."""
    known = [name for name, _ in fields()]
    section, _, leaf = path.rpartition(".")
    neighbours = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known)}
    for wanted, candidates, cutoff in ((leaf, neighbours, 0.7), (leaf, elsewhere, 1.0),
                                       (path, dict.fromkeys(known), 0.7), (leaf, elsewhere, 0.7)):
        match = difflib.get_close_matches(wanted, candidates, n=1, cutoff=cutoff)
        if match:
            return f"; did you mean `{candidates[match[0]] or match[0]}`?"
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known))
    match = difflib.get_close_matches(path.partition(".")[0], sections, n=1)
    if match and match[0] != path.partition(".")[0]:
        return f"; did you mean a setting of `{match[0]}`?"
    return f"; there are the sections {', '.join(sections)}" if not match else ""


def _merge(into: Tree, tree: Mapping[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            if not isinstance(into.get(name), dict):
                into[name] = {}
            _merge(into[name], value)
        else:
            into[name] = value


def _first_mistake(error: ValidationError, layers: Sequence[Layer]) -> BadValue:
    mistakes = error.errors(include_url=False)
    path, value = _path_of(mistakes[0]["loc"]), mistakes[0]["input"]
    same = [mistake for mistake in mistakes if _path_of(mistake["loc"]) == path]
    expected = " or ".join(dict.fromkeys(map(_expectation, same)))
    if mistakes[0]["type"] == "value_error":
        return BadValue(expected)
    if mistakes[0]["type"] == "missing":
        return BadValue(f"setting `{path}` is missing and has no default", setting=path)
    origin = _origin(path, layers)
    return BadValue(f"setting `{path}` = {_shown(value)}: expected {expected}{f' (from {origin})' if origin else ''}",
                    setting=path)


def _path_of(location: Sequence[int | str]) -> str:
    """The setting behind a pydantic location, without the steps that pydantic adds inside unions and lists."""
    known = dict(fields())
    path = ""
    for part in location:
        path = f"{path}.{part}" if path else str(part)
        if path in known:
            field = known[path]
            return path if not is_free_table(field) else ".".join(map(str, location[:path.count(".") + 2]))
    return path


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


EXPECTATIONS = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "bool_type": "true or false", "string_type": "text", "finite_number": "a finite number",
    "model_type": "a table of settings", "model_attributes_type": "a table of settings", "dict_type": "a table",
    "tuple_type": "a list", "list_type": "a list",
}


def _expectation(details: Any) -> str:
    """What would have been right, in the reader's words instead of pydantic's where those are about Python."""
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    if details["type"] == "string_pattern_mismatch":
        return f"text that matches {details['ctx']['pattern']}"
    if details["type"] in ("too_short", "too_long"):
        return f"a list of {_bound(details['ctx'])}"
    message = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return EXPECTATIONS.get(details["type"]) or (f"a number {message}" if " than" in message else message)


def _bound(context: Mapping[str, Any]) -> str:
    most = context.get("max_length")
    return f"at most {most}" if most is not None else f"{context['min_length']} or more"


def _origin(path: str, layers: Sequence[Layer]) -> str:
    """The last layer that said anything about `path`."""
    for layer in reversed(layers):
        node: Any = layer.tree
        for name in path.split("."):
            if not isinstance(node, Mapping) or name not in node:
                break
            node = node[name]
        else:
            return layer.origin
    return ""
