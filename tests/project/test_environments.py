"""Whoever makes an environment is alone with it."""

from __future__ import annotations

import threading

import pytest

from tests.project.environments import alone


def test_who_comes_second_waits_for_the_first_and_not_longer_than_it_may() -> None:
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with alone("test-of-locks", 10.0):
            inside.set()
            leave.wait(10.0)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10.0)
    with pytest.raises(AssertionError, match=r"\.venv-test-of-locks is being made by somebody else"), \
            alone("test-of-locks", 0.3):
        order.append("never")
    leave.set()
    with alone("test-of-locks", 10.0):
        order.append("second")
    thread.join(10.0)
    assert order == ["first", "second"]
