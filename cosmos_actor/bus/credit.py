"""How much a receiver lets a sender have unfinished. Pure."""

from __future__ import annotations

from typing import Dict


class Credit:
    """Never more than the granted messages and bytes are taken at a time.

        take -> (message under way) -> give_back, exactly once each
    """

    def __init__(self, messages: int, nbytes: int) -> None:
        self.granted_messages = messages
        self.granted_bytes = nbytes
        self.used_messages = 0
        self.used_bytes = 0
        self.refusals = 0

    def take(self, nbytes: int) -> bool:
        """Reserve one message of this size; False (and nothing taken) if it does not fit now."""
        fits = self.used_messages < self.granted_messages and self.used_bytes + nbytes <= self.granted_bytes
        if not fits:
            self.refusals += 1
            return False
        self.used_messages += 1
        self.used_bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        self.used_messages -= 1
        self.used_bytes -= nbytes
        if self.used_messages < 0 or self.used_bytes < 0:
            raise AssertionError(f"credit given back twice: {self.statistics()}")

    def grant(self, messages: int, nbytes: int) -> None:
        """The receiver's newest word; less than what is used lets nothing out until enough came back."""
        self.granted_messages = messages
        self.granted_bytes = nbytes

    def statistics(self) -> Dict[str, int]:
        return {
            "granted_messages": self.granted_messages,
            "granted_bytes": self.granted_bytes,
            "used_messages": self.used_messages,
            "used_bytes": self.used_bytes,
            "refusals": self.refusals,
        }
