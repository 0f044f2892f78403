"""Named arrays in one file, whole or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from cosmos_actor.actors.disk import writing
from cosmos_actor.actors.errors import UserError


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Whoever is killed meanwhile leaves the file that was there before. Raises RunDirectoryUnusable naming it."""
    draft = path.with_name(f".writing-{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.savez(draft, **arrays)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def read_arrays(path: Path, remedy: str) -> dict[str, np.ndarray]:
    """Raises UserError, which ends with `remedy`, for a file that is missing, cut or changed (each array has a CRC)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        why = "it is no file of arrays" if isinstance(error, ValueError) else error  # numpy's words are about pickles
        raise UserError(f"{path} can not be read: {why}; {remedy}", setting="run.run_dir") from error
