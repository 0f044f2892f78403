"""Wakes a thread that polls sockets."""

from __future__ import annotations

import os
import threading


class Waker:
    """After `set`, from any thread and however often, the descriptor stays readable until `clear`."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for descriptor in (self.fd, self._write):
            os.set_blocking(descriptor, False)
        self._closed = False
        self._lock = threading.Lock()
        """A descriptor that was closed under `set` may be another file by the time of the write."""

    def set(self) -> None:
        with self._lock:
            if not self._closed:
                self._write_one()

    def clear(self) -> None:
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
                os.close(self._write)

    def _write_one(self) -> None:
        try:
            os.write(self._write, b".")
        except BlockingIOError:
            pass  # Full: it is readable already.
