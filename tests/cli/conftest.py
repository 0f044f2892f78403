from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cosmos_actor.cli.app import run


@dataclass(frozen=True)
class Answer:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a refused command prints; fails the test when it is not exactly that."""
        assert self.code == 2, self
        assert self.err.startswith("error: ") and self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        assert "Traceback" not in self.err
        return self.err.removeprefix("error: ").rstrip("\n")


Cli = Callable[..., Answer]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the command is called in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(here: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in the empty folder `here`."""

    def call(*arguments: str) -> Answer:
        code = run([*arguments])
        out, err = capfd.readouterr()
        return Answer(code, out, err)

    return call
