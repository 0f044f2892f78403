"""From a recipe's name or file and `--set` flags to settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from cosmos_actor.actors.errors import BadValue, UnknownName
from cosmos_actor.recipes.layers import Layer, layer_of_flag, parse_toml, resolve_layers
from cosmos_actor.recipes.resolved import read_text
from cosmos_actor.recipes.settings import RunSettings

BASES_AT_MOST = 8
"""A chain of `base = …` longer than this is a circle or a maze."""


def recipe_names() -> list[str]:
    """Names of the packaged recipes."""
    files = resources.files("cosmos_actor.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def resolve(recipe: str, flags: Iterable[str] = ()) -> RunSettings:
    """Settings of a packaged recipe or a TOML file, with `--set` flags on top.

    What nobody set is derived: the run is named after the recipe, and the model's seed is the run's.
    Raises UnknownName (recipe or setting, with the nearest match), BadValue, NotFound: one line each.
    """
    layers = [*recipe_layers(recipe), *map(layer_of_flag, flags)]
    settings = resolve_layers(layers)
    derived = {"run": {"name": Path(recipe).stem}, "policy": {"seed": settings.run.seed}}
    return resolve_layers([Layer("derived", derived), *layers])


def recipe_layers(recipe: str, beside: Path | None = None, depth: int = 0) -> list[Layer]:
    """The recipe's own layer, after those of its `base`. A relative base is looked for beside the file naming it."""
    if depth > BASES_AT_MOST:
        raise BadValue(f"{recipe}: more than {BASES_AT_MOST} recipes stand on each other; does `base` go in a circle?")
    if not _looks_like_path(recipe):
        return [Layer(f"recipe {recipe}", parse_toml(_packaged(recipe), f"recipe {recipe}"))]
    path = (beside / recipe) if beside is not None else Path(recipe)
    if path.is_dir():
        raise BadValue(f"{recipe} is a directory and no recipe; a run is gone on with by `up RECIPE --resume --run-dir "
                       f"{recipe}`")
    tree = parse_toml(read_text(path), str(path))
    base = tree.pop("base", None)
    if base is None:
        return [Layer(str(path), tree)]
    if not isinstance(base, str):
        raise BadValue(f"setting `base` = {base!r}: expected the name or path of a recipe (from {path})")
    return [*recipe_layers(base, path.parent, depth + 1), Layer(str(path), tree)]


def _looks_like_path(recipe: str) -> bool:
    return recipe.endswith(".toml") or "/" in recipe


def _packaged(recipe: str) -> str:
    names = recipe_names()
    if recipe in names:
        return (resources.files("cosmos_actor.recipes") / f"{recipe}.toml").read_text(encoding="utf-8")
    nearest = difflib.get_close_matches(recipe, names, n=1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(names)}, or the path of a TOML file"
    raise UnknownName(f"no recipe named `{recipe}`; {hint}")
