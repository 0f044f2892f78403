"""An actor's life: announced, set up, ready, gone; and what the head knows of it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cosmos_actor.actors import runtime as module
from cosmos_actor.actors.loading import load_object
from cosmos_actor.actors.role import Role, follows, handles
from cosmos_actor.actors.runtime import HeadLost
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.bus import PeerRefused, RemoteError
from cosmos_actor.job.roles import CONTROL_CLASSES, STATEFUL
from tests.actors.small_cluster import Answer, BrokenRole, EchoRole, Question, SmallCluster, with_cluster


def member(cluster: SmallCluster, actor: str):
    return cluster.head.registry.member(actor)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_an_announced_actor_is_a_member_and_becomes_ready_after_its_setup():
    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-0")
        assert member(cluster, "echo-0").incarnation == runtime.bus.identity.incarnation
        await until(lambda: member(cluster, "echo-0").ready)
        assert runtime.state == "ready"

    with_cluster(test)


def test_a_setup_that_fails_ends_the_actor_with_its_reason():
    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-0", BrokenRole)
        with pytest.raises(RuntimeError, match="the model does not fit"):
            await runtime.until_stopped()

    with_cluster(test)


def test_a_setup_waits_for_the_role_that_the_job_needs_earlier():
    class LateRole(EchoRole):
        setup_after = "first"

    async def test(cluster: SmallCluster) -> None:
        late = await cluster.add("echo-0", LateRole)
        await asyncio.sleep(0.05)
        assert late.state == "starting"
        await cluster.add("first-0")
        await until(lambda: late.state == "ready")

    with_cluster(test)


def test_a_joining_actor_with_a_living_ones_name_is_refused():
    async def test(cluster: SmallCluster) -> None:
        first = await cluster.add("echo-0")
        with pytest.raises(PeerRefused, match="the run has an actor named echo-0 already; take another name"):
            await cluster.add("echo-0", joined=True)
        assert member(cluster, "echo-0").incarnation == first.bus.identity.incarnation

    with_cluster(test)


def test_an_actor_ends_when_its_head_is_gone():
    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-0")
        await cluster.head.bus.close(drain_s=0.1)
        with pytest.raises(HeadLost):
            await runtime.until_stopped()

    with_cluster(test)


def test_the_head_ends_actors_that_joined():
    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-7", joined=True)
        await cluster.head.stop_joined("the run is over")
        await runtime.until_stopped()
        assert runtime.stopped.is_set() and runtime.failure is None

    with_cluster(test)


def test_a_follower_sees_the_latest_value_and_its_events_reach_the_controller():
    class FollowingRole(Role):
        @follows("topic")
        async def on_value(self, question: Question) -> None:
            await self.context.emit(Question(question.number + 1))

    async def test(cluster: SmallCluster) -> None:
        seen: list[int] = []
        cluster.bus.serve_event(Question, lambda question, link: seen.append(question.number))
        cluster.bus.publish_state("topic", Question(1))
        await cluster.add("echo-0", FollowingRole)
        await until(lambda: seen)
        assert seen == [2]

    with_cluster(test)


def test_random_numbers_depend_on_the_seed_the_actor_and_the_name_alone():
    async def test(cluster: SmallCluster) -> None:
        first, second = await cluster.add("echo-0"), await cluster.add("echo-1")
        draws = [runtime.context.rng(name).integers(1 << 40) for runtime, name in
                 ((first, "a"), (first, "a"), (first, "b"), (second, "a"))]
        assert draws[0] == draws[1] and len(set(draws)) == 3

    with_cluster(test)


def test_the_stateful_roles_are_those_whose_classes_say_so():
    classes = {name: load_object(path, setting="--role") for name, path in CONTROL_CLASSES.items()}
    assert {name for name, role in classes.items() if role.stateful} == STATEFUL
    assert all(role.name == name for name, role in classes.items())


def test_a_handler_is_a_method_that_says_which_message_it_takes():
    class TwoHandlers(Role):
        @handles(Question, concurrency=3)
        def one(self, question: Question) -> None: ...

    assert [(kind, method.__name__, concurrency) for kind, method, concurrency in TwoHandlers(None).handlers()] == [
        (Question, "one", 3)]


def test_a_long_computation_does_not_hold_a_close(monkeypatch):
    monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 0.05)
    end = threading.Event()

    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-0", worker=ThreadWorker("echo"))
        await until(lambda: runtime.state == "ready")
        computing = asyncio.ensure_future(runtime.context.compute("sampling", end.wait, 20.0))
        await until(lambda: runtime.context.busy_label == "sampling")
        await asyncio.wait_for(cluster.actors.pop("echo-0").close(), 10.0)
        assert not computing.done()
        end.set()
        await computing

    with_cluster(test)


class LibraryPanic(BaseException):
    """As Rust's panics and torch's CheckpointException come through."""


@pytest.mark.parametrize(("error", "words"), [
    (SystemExit("bye"), r"AskedToExit: .*sys\.exit\('bye'\)"), (LibraryPanic("deep inside"), "Panic: .*deep inside")])
def test_a_role_whose_code_exits_or_panics_fails_that_call_and_lives_on(error, words):
    class ExitingRole(EchoRole):
        @handles(Question)
        def answer(self, question: Question):
            raise error

    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-0", ExitingRole, worker=ThreadWorker("test"))
        for _ in range(2):
            with pytest.raises(RemoteError, match=words):
                await cluster.fleet.submit("echo", Question(1), deadline_s=5.0, what="an answer")
        assert runtime.state == "ready"

    with_cluster(test)


def test_a_setup_that_panics_ends_the_actor_with_that_reason():
    class PanickingRole(EchoRole):
        def setup(self):
            raise LibraryPanic("deep inside")

    async def test(cluster: SmallCluster) -> None:
        runtime = await cluster.add("echo-0", PanickingRole, worker=ThreadWorker("test"))
        with pytest.raises(Exception, match="setup: LibraryPanic: deep inside"):
            await asyncio.wait_for(runtime.until_stopped(), 10.0)

    with_cluster(test)


def test_work_that_comes_to_an_actor_whose_worker_is_closed_goes_to_the_next_one():
    """An answer of any kind would be taken for the work's: the job ended with the error of a closed pool."""
    class PlainRole(EchoRole):
        @handles(Question)
        def answer(self, question: Question) -> Answer:
            return Answer(question.number, self.context.identity.actor)

    async def test(cluster: SmallCluster) -> None:
        ending = await cluster.add("echo-0", PlainRole, worker=ThreadWorker("ending"))
        await until(lambda: member(cluster, "echo-0").ready)
        close_bus, closes = ending.bus.close, asyncio.Event()

        async def later(**options) -> None:
            await closes.wait()
            await close_bus(**options)

        ending.bus.close = later
        closing = asyncio.create_task(ending.close())
        await asyncio.sleep(0.1)
        asked = asyncio.create_task(cluster.fleet.submit("echo", Question(3), deadline_s=10.0, what="an answer"))
        await asyncio.sleep(0.1)
        assert not asked.done()
        await cluster.add("echo-1", PlainRole)
        closes.set()
        await closing
        del cluster.actors["echo-0"]
        assert (await asked).actor == "echo-1" and cluster.fleet.redelivered["echo"] == 1

    with_cluster(test)
