"""Whatever happens in whatever order, the guarantees of the supervision hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.restart_policy import Outcome, Restart, Strategy
from cosmos_actor.actors.supervision import Phase
from tests.actors.scripted_supervision import World, child

NAMES = "abcd"
Step = tuple[str, str, object]

specs = st.lists(st.builds(
    lambda restart, significant: (restart, significant and restart is not Restart.PERMANENT),
    st.sampled_from(list(Restart)), st.booleans()), min_size=1, max_size=4)
steps = st.lists(st.one_of(
    st.tuples(st.just("ready"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("ends"), st.sampled_from(NAMES), st.sampled_from(list(Outcome))),
    st.tuples(st.just("after"), st.none(), st.sampled_from([0.0, 0.5, 4.0, 40.0])),
    st.tuples(st.just("remove"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("kill"), st.sampled_from(NAMES), st.none()),
), max_size=40)


@settings(max_examples=300, deadline=None)
@given(specs, st.sampled_from(list(Strategy)), st.integers(0, 4), steps)
def test_one_life_at_a_time_starts_in_order_and_a_stop_always_ends(
        rules: list[tuple[Restart, bool]], strategy: Strategy, intensity: int, what: list[Step]) -> None:
    world = World(*_children(rules), strategy=strategy, intensity=intensity)
    world.start(ready=False)
    for step in what:
        _happen(world, step)
        _check(world)
    _stop_and_check(world)


def _children(rules: list[tuple[Restart, bool]]) -> list[ChildSpec]:
    return [child(name, restart=restart, significant=significant, heartbeat_s=30.0)
            for name, (restart, significant) in zip(NAMES, rules, strict=False)]


def _happen(world: World, step: Step) -> None:
    what, actor, value = step
    if what == "after":
        world.after(float(str(value)))
    elif what == "ends" and actor in world.alive:
        world.ends(actor, Outcome(value))
    elif what == "ready" and actor in world.alive:
        world.ready(actor)
    elif what == "remove" and actor in world.core.children:
        world.take(world.core.remove(actor, world.now))
    elif what == "kill" and actor in world.core.children:
        world.take(world.core.kill(actor, "no good", world.now))


def _check(world: World) -> None:
    """The supervision's picture and the world agree, and whoever is alive has a deadline or is ready."""
    children = world.core.children
    assert {name for name, each in children.items() if each.alive} == set(world.alive)
    for each in children.values():
        assert not each.alive or each.state.value == "ready" or each.deadline is not None
    stopping = [name for name, each in children.items() if each.state.value == "stopping"]
    assert len(stopping) <= 1, "stops are one at a time"
    if world.core.phase is Phase.ENDED:
        assert not world.alive


def _stop_and_check(world: World) -> None:
    """Nobody obeys: the stop still ends, within its bound and what killed processes may take."""
    world.stop()
    began = world.now
    while (deadline := world.core.next_deadline()) is not None:
        world.after(max(0.0, deadline - world.now))
    assert world.core.phase is Phase.ENDED and not world.alive
    assert world.now - began <= 30.0 + 5.0
