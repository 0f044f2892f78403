"""What the file system refuses, as one line that names the file: a full disk, a right that is missing, a folder in its
place."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosmos_actor.actors.errors import RunDirectoryUnusable

REFUSALS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EIO, errno.EISDIR,
    errno.ENOTDIR, errno.EFBIG})
"""What a person can put right. Other errors of the operating system are faults of the program."""


def refusal(error: BaseException) -> RunDirectoryUnusable | None:
    """The line for an error that a refusal of the file system is, or is the cause of; None for another one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in REFUSALS:
            return _line(seen.filename or "the run directory", seen)
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever writes `path` within: a refusal, of a file of whatever name, becomes one line about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise _line(path, error) from error


def named(error: OSError, path: Path) -> OSError:
    """The same error with the file's name: that of a write, unlike that of an open, has none."""
    return type(error)(error.errno, error.strerror, str(path))


def _line(path: Path | str | bytes, error: OSError) -> RunDirectoryUnusable:
    return RunDirectoryUnusable(f"{path!s} can not be written: {error.strerror}; when that is put right, `up --resume` "
                                "goes on from the latest checkpoint", setting="run.run_dir")
