"""`cosmos-actor version`: what is installed here."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import typer

from cosmos_actor import __version__
from cosmos_actor.cli.arguments import JsonOption

NAME, EXAMPLE = "version", "cosmos-actor version --json"
LIBRARIES = ("pyzmq", "msgpack", "numpy", "pydantic", "torch", "transformers", "vllm")


def command(as_json: JsonOption = False) -> None:
    """Print the version of cosmos-actor, Python and the libraries it works with."""
    versions: dict[str, str | None] = {"cosmos-actor": __version__, "python": platform.python_version()}
    versions |= {name: _installed(name) for name in LIBRARIES}
    if as_json:
        typer.echo(json.dumps(versions))
        return
    for name, version in versions.items():
        typer.echo(f"{name:14}{version or 'not installed'}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
