from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus.latest import LatestInbox, LatestOutbox

STEPS = st.lists(st.sampled_from(["publish a", "publish b", "deliver", "lose", "confirm", "new wire"]), max_size=100)


@given(STEPS)
def test_values_only_get_newer_and_the_newest_arrives(steps: list[str]) -> None:
    outbox, inbox = LatestOutbox(10), LatestInbox()
    wire: list[tuple[str, int, int]] = []
    confirmations: list[tuple[str, int]] = []
    seen: dict[str, list[int]] = {"a": [], "b": []}
    published = {"a": 0, "b": 0}

    def deliver() -> None:
        topic, revision, value = wire.pop(0)
        if inbox.accept(topic, revision):
            seen[topic].append(value)
        confirmations.append((topic, revision))

    def confirm() -> None:
        topic, revision = confirmations.pop(0)
        ready = outbox.confirm(topic, revision)
        wire.extend([(topic, *ready)] if ready else [])

    def new_wire() -> None:
        confirmations.clear()
        wire[:] = outbox.again()

    for step in steps:
        if step.startswith("publish"):
            topic = step[-1]
            published[topic] += 1
            ready = outbox.publish(topic, published[topic])
            wire.extend([(topic, *ready)] if ready else [])
        elif step == "deliver" and wire:
            deliver()
        elif step == "lose" and wire:
            wire.pop(0)
        elif step == "confirm" and confirmations:
            confirm()
        elif step == "new wire":
            new_wire()
        assert all(values == sorted(set(values)) for values in seen.values())
        assert len(wire) <= 2, "one value per topic is under way"
    new_wire()
    while wire or confirmations:
        deliver() if wire else confirm()
    for topic, count in published.items():
        assert seen[topic][-1:] == ([count] if count else [])
    assert outbox.unconfirmed == 0
    assert inbox.skipped == sum(published[topic] - len(seen[topic]) for topic in seen)


def test_too_many_topics_are_refused() -> None:
    outbox = LatestOutbox(1)
    outbox.publish("a", 1)
    with pytest.raises(OverflowError):
        outbox.publish("b", 1)
    outbox.publish("a", 2)


def test_an_older_revision_is_no_news() -> None:
    inbox = LatestInbox()
    assert [inbox.accept("a", revision) for revision in (3, 2, 3, 4)] == [True, False, False, True]
    assert inbox.skipped == 2 and inbox.topics == 1
