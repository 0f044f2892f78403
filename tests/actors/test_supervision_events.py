"""Who may come and go, and who may say what to a supervision."""

from __future__ import annotations

import pytest

from cosmos_actor.actors.restart_policy import Outcome
from cosmos_actor.actors.supervision import IllegalEvent, Supervision
from tests.actors.scripted_supervision import TRANSIENT, World, child


def three() -> World:
    return World(child("a"), child("b"), child("c")).start()


# ---- coming and going


def test_an_added_child_starts_at_once_and_stops_first() -> None:
    world = three()
    world.take(world.core.add(child("d"), world.now))
    world.ready("d")
    world.stop()
    assert world.took() == ["start d", "stopping stopped: enough", "terminate d"]


def test_an_added_child_that_fails_to_start_is_forgotten_and_the_job_goes_on() -> None:
    world = three()
    world.take(world.core.add(child("d"), world.now))
    world.ends("d")
    assert world.took() == ["start d"] and world.core.end is None and "d" not in world.core.children


def test_a_removed_child_is_stopped_and_not_started_again() -> None:
    world = three()
    world.take(world.core.remove("b", world.now))
    world.stops("b")
    assert world.took() == ["terminate b"]
    assert list(world.core.children) == ["a", "c"]


# ---- who may say what


def test_what_an_older_life_says_changes_nothing_and_is_counted() -> None:
    world = World(child("a", heartbeat_s=3.0)).start()
    world.ends("a")
    world.core.heartbeat("a", 1, world.now)
    world.take(world.core.ready("a", 1, world.now))
    assert world.state("a") == "starting"
    assert world.core.statistics()["stale_events"] == 2


@pytest.mark.parametrize("event", ["ready", "exited"])
def test_a_life_that_never_was_can_not_speak(event: str) -> None:
    world = World(child("a")).start()
    for actor, incarnation in (("a", 2), ("nobody", 1)):
        with pytest.raises(IllegalEvent, match=f"{event} {actor}#{incarnation}"):
            if event == "ready":
                world.core.ready(actor, incarnation, 0.0)
            else:
                world.core.exited(actor, incarnation, Outcome.NORMAL, "finished", 0.0)


def test_an_illegal_event_prints_the_history() -> None:
    world = World(child("a", restart=TRANSIENT)).start()
    world.after(1.0)
    world.ends("a", Outcome.NORMAL, "finished")
    with pytest.raises(IllegalEvent) as caught:
        world.core.exited("a", 1, Outcome.NORMAL, "finished", 2.0)
    assert "it is down" in str(caught.value)
    assert "0.000 ready a#1\n  1.000 exited a#1 normal: finished" in str(caught.value)


def test_starting_twice_time_that_goes_back_and_an_add_while_stopping_are_illegal() -> None:
    world = World(child("a")).start()
    with pytest.raises(IllegalEvent, match="the supervisor is running"):
        world.core.start(1.0)
    with pytest.raises(IllegalEvent, match="it is 1.000 already"):
        world.core.stop("enough", 0.5)
    world.now = 1.0
    world.stop()
    with pytest.raises(IllegalEvent, match="the supervisor is stopping"):
        world.core.add(child("b"), 2.0)


@pytest.mark.parametrize("specs, wrong", [
    ((child("a"), child("a")), "a is named twice"),
    ((child("a", after=("b",)), child("b")), "a can not wait for b: name them earlier"),
])
def test_children_that_can_not_be_ordered_are_refused(specs: tuple, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Supervision(specs)
