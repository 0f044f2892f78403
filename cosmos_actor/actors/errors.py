"""What a person can put right: one line on stderr, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what was asked for. `str()` of it is one line that names the setting, flag or path to change."""

    def __init__(self, line: str, *, setting: str | None = None) -> None:
        self.line = " ".join(line.split())
        self.setting = setting
        super().__init__(self.line)

    def __str__(self) -> str:
        if self.setting is None or self.setting in self.line:
            return self.line
        return f"{self.line} (setting `{self.setting}`)"


class UnknownName(UserError):
    """A name (setting, recipe, actor) that does not exist; the line offers the nearest one that does."""


class BadValue(UserError):
    """A value of the wrong type or out of range; the line says what was expected."""


class NotFound(UserError):
    """A file, directory, interpreter or run that was named and is not there."""


class RunDirectoryBusy(UserError):
    """Another living job holds this run directory."""


class RunDirectoryMismatch(UserError):
    """The run directory was made by another configuration."""


class RunDirectoryUnusable(UserError):
    """The file system does not let a run be written there; the line has its reason."""


class JobFailed(UserError):
    """The job ended because one of its processes did; the line says which one and why."""
