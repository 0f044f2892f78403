"""What the bus of `up`'s own process warns of: whole in logs/up.log, once each and in words on the display."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = "cosmos_actor"
SHOWN_AT_MOST = 20
"""Different warnings on the display of one run. A stranger that knocks for ever must not scroll the run away."""
OWN_NAME = re.compile(r"^registry-0/[^ ]*: ")
INCARNATION = re.compile(r"(?<=[\w-])/(\d+-)?[0-9a-f]{16,}")


class UpLog(logging.Handler):
    """Guarantee: no line on stderr, and no failure of the file is one of the run."""

    def __init__(self, path: Path, notice: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._path, self._notice = path, notice
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(self.format(record) + "\n")
        except OSError:
            pass  # a full disk: what has to be said of it is said where the run needs the disk
        self._show(INCARNATION.sub("", OWN_NAME.sub("", record.getMessage())))

    def _show(self, text: str) -> None:
        if text in self._shown or len(self._shown) >= SHOWN_AT_MOST:
            return
        self._shown.add(text)
        self._notice(text)
        if len(self._shown) == SHOWN_AT_MOST:
            self._notice(f"further warnings are only in {self._path}")


@contextmanager
def warnings_into(path: Path, notice: Callable[[str], None]) -> Iterator[None]:
    """All warnings of this package's loggers, and nowhere else."""
    logger, handler = logging.getLogger(LOGGER), UpLog(path, notice)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
