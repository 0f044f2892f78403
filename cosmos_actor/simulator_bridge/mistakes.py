"""What a person can put right: one line on stderr, exit code 2, no traceback."""

LONGEST_ERROR = 300
"""Characters of what somebody else's code says; the rest goes below it, as a traceback."""


class Mistake(Exception):
    """Something in what was asked for. `str()` of it is one line that names the flag, file or package to change."""

    def __init__(self, line: str) -> None:
        super().__init__(" ".join(line.split()))


def one_line(error: BaseException) -> str:
    """Its type and what it says."""
    return " ".join("{}: {}".format(type(error).__name__, error).split())[:LONGEST_ERROR]
