"""Which Python a part needs. Standard library only, syntax of Python 3.8: this has to run where the rest can not."""

import sys
from typing import Sequence, Union

NEEDED = (3, 10)


class PythonTooOld(ImportError):
    """A part was imported on a Python that it does not run on."""


def need(part: str, version: Sequence[Union[int, str]] = sys.version_info) -> None:
    """Return on a Python that runs `part`; else raise PythonTooOld, whose text is one line that says what does run."""
    if tuple(version[:2]) < NEEDED:
        raise PythonTooOld("{} needs Python {}.{} or newer, this is {}.{}; bus, simulator_bridge and the commands "
                           "`attach` and `sim` run here".format(part, *NEEDED, version[0], version[1]))
