"""The other Pythons that tests run: where they are, and what a test does when one is missing."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def find_python(version: str) -> str | None:
    """An interpreter of exactly `version` ("3.8") or None: $COSMOS_ACTOR_PYTHON38, one of pyenv's, one on the PATH."""
    pyenv = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    candidates = [
        os.environ.get(f"COSMOS_ACTOR_PYTHON{version.replace('.', '')}"),
        *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python")),
        shutil.which(f"python{version}"),
    ]
    return next((path for path in candidates if path and _version(path) == version), None)


def require_python(version: str) -> str:
    """As `find_python`, but a missing one skips the test, and fails it in CI (where the promise must be proved)."""
    found = find_python(version)
    if found:
        return found
    reason = f"no CPython {version} here: name one in COSMOS_ACTOR_PYTHON{version.replace('.', '')}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _version(python: str) -> str | None:
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
