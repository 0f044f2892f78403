"""What a person can put right: one line on stderr, exit code 2, no traceback."""


class Mistake(Exception):
    """Something in what was asked for. `str()` of it is one line that names the flag, file or package to change."""

    def __init__(self, line: str) -> None:
        super().__init__(" ".join(line.split()))
