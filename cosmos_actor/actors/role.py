"""What a role is: a class whose marked methods answer typed messages, with every input coming through its context.

A role owns no socket, no clock and no source of chance. Messages reach it through methods marked with `handles`,
everything else through `self.context` (clock, random numbers, weights). That single seam is what lets one actor be
recorded and played back alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from cosmos_actor.actors.context import Context

Handler = TypeVar("Handler", bound=Callable[..., Any])
_MARK = "__cosmos_actor_handles__"
_TOPIC = "__cosmos_actor_follows__"


def handles(message_type: type, *, concurrency: int = 1) -> Callable[[Handler], Handler]:
    """Mark a method as the answer to `message_type`: it takes the message and returns a message or None.

    A plain method runs in the actor's one worker, so two plain methods never overlap. An `async` method runs on the
    loop and may overlap with others up to `concurrency`; it takes compute to the worker by `context.compute`.
    """

    def mark(method: Handler) -> Handler:
        setattr(method, _MARK, (message_type, concurrency))
        return method

    return mark


def follows(topic: str) -> Callable[[Handler], Handler]:
    """Mark an `async` method as the follower of a state topic: it gets the latest value, older ones may be skipped."""

    def mark(method: Handler) -> Handler:
        setattr(method, _TOPIC, topic)
        return method

    return mark


class Role:
    """One kind of work. `stateful` says what its death means.

    The work of a stateless role is given to another member. A stateful role loses what it held since the last
    checkpoint, so its death rewinds the job to that checkpoint.
    """

    name: ClassVar[str] = ""
    stateful: ClassVar[bool] = False
    setup_after: ClassVar[str] = ""
    """A role that the job needs earlier: this one's `setup` leaves the processors to it until it is ready."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def setup(self) -> None:
        """The slow part of the start (imports, models). Runs in the worker; messages wait until it is over."""

    def close(self) -> None:
        """Let go of what `setup` took. Runs in the worker, after the last message."""

    def weights_held(self) -> str:
        """The version this actor acts with, for `status`; empty when the role holds no weights."""
        return ""

    def weights_proof(self) -> dict[str, Any]:
        """Of the version that it acts with, or published: version, digest, and since when (seconds after 1970)."""
        return {}

    def handlers(self) -> Iterator[tuple[type, Callable[..., Any], int]]:
        """(message type, bound method, concurrency) of every marked method."""
        for _, method in inspect.getmembers(self, callable):
            mark = getattr(method, _MARK, None)
            if mark is not None:
                yield mark[0], method, mark[1]

    def followers(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """(topic, bound method) of every method marked with `follows`."""
        for _, method in inspect.getmembers(self, callable):
            topic = getattr(method, _TOPIC, None)
            if topic is not None:
                yield topic, method
