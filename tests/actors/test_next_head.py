"""A head dies and another takes its place: actors work on, come back by themselves, and who does not is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cosmos_actor.actors.messages import PROCESSES_TOPIC, READY, Member, Processes
from cosmos_actor.actors.runtime import ActorRuntime, HeadLost
from cosmos_actor.bus import PeerRefused
from tests.actors.small_cluster import HEAD, SmallCluster, with_cluster


async def until(look: Callable[[], Any]) -> None:
    while not look():
        await asyncio.sleep(0.005)


async def ready(cluster: SmallCluster, *actors: str, **options: Any) -> list[ActorRuntime]:
    runtimes = [await cluster.add(actor, **options) for actor in actors]
    await until(lambda: all(member_of(cluster, actor) and member_of(cluster, actor).ready for actor in actors))
    await cluster.fleet.wait_for_members("echo", len(actors), 10.0)
    return runtimes


def member_of(cluster: SmallCluster, actor: str) -> Member | None:
    return cluster.head.registry.member(actor)


def linked(cluster: SmallCluster) -> set[str]:
    return set(cluster.head.bus.links)


def test_work_goes_on_without_a_head_and_all_come_back_to_the_next_one():
    async def test(cluster: SmallCluster) -> None:
        first, second = await ready(cluster, "echo-0", "echo-1")
        lives = {actor: member_of(cluster, actor).incarnation for actor in ("echo-0", "echo-1")}
        cluster.kill_head()
        answers = {(await cluster.ask(number)).actor for number in range(6)}
        assert answers == {"echo-0", "echo-1"}, "nobody needs the head to work"
        await cluster.next_head()
        assert {member.actor: member.incarnation for member in cluster.head.registry.membership().members} == lives
        await until(lambda: {"echo-0", "echo-1"} <= linked(cluster) and len(cluster.head.statuses) == 2)
        assert {actor: member_of(cluster, actor).incarnation for actor in lives} == lives
        assert all(member_of(cluster, actor).ready for actor in lives)
        assert (first.state, second.state) == (READY, READY) and not first.stopped.is_set()
        assert not cluster.head.registry.membership().departed
        assert (await cluster.ask(7)).number == 7

    with_cluster(test)


def test_the_fleet_believes_the_next_head_whose_serials_begin_anew():
    async def test(cluster: SmallCluster) -> None:
        await ready(cluster, "echo-0")
        for number in range(20):
            cluster.head._publish(cluster.head.registry.departed("echo-9", str(number), "gone"))
        await until(lambda: cluster.fleet._newest[1] > 20)
        cluster.kill_head()
        cluster.journal = cluster.journal[:2]
        await cluster.next_head()
        await until(lambda: "registry-0" not in cluster.bus.links)
        await cluster.bus.connect(HEAD, role="registry")
        await cluster.add("echo-5")
        await until(lambda: "echo-5" in cluster.fleet.members("echo"))

    with_cluster(test)


def test_who_died_while_there_was_no_head_is_told_by_the_owner_of_the_processes():
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0")
        life = runtime.bus.identity.incarnation
        cluster.kill_head()
        runtime.end()
        await runtime.close()
        await cluster.next_head()
        owner = cluster._bus("supervisor", "supervisor-0")
        owner.publish_state(PROCESSES_TOPIC, Processes([], {life: "killed by SIGKILL"}, ""))
        await owner.start(None)
        await owner.connect(HEAD, role="registry")
        await until(lambda: member_of(cluster, "echo-0") is None)
        assert cluster.head.registry.membership().departed[life] == "killed by SIGKILL"
        await owner.close(0.1)

    with_cluster(test)


def test_processes_are_the_supervisors_to_tell():
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0")
        cluster.bus.publish_state(PROCESSES_TOPIC, Processes([], {runtime.bus.identity.incarnation: "a lie"}, ""))
        await cluster.ask()
        await asyncio.sleep(0.1)
        assert member_of(cluster, "echo-0") is not None

    with_cluster(test)


def test_who_does_not_come_back_in_time_is_gone_and_stays_away():
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0")
        life = runtime.bus.identity.incarnation
        cluster.kill_head()
        runtime._head_address = "memory://nowhere"  # a partition between the two
        await until(lambda: runtime._seeking)
        await cluster.next_head(return_s=0.2)
        await until(lambda: member_of(cluster, "echo-0") is None)
        assert "did not come back within 0.2 s" in cluster.head.registry.membership().departed[life]
        runtime._head_address = HEAD
        with pytest.raises(HeadLost, match="stale incarnation") as lost:
            await runtime.until_stopped()
        assert not lost.value.final, "a new life of it may join"

    with_cluster(test)


def test_a_newer_life_takes_the_place_of_one_that_is_not_back_yet():
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0")
        cluster.kill_head()
        runtime.end()
        await runtime.close()
        await cluster.next_head()
        newer = await cluster.add("echo-0")
        assert member_of(cluster, "echo-0").incarnation == newer.bus.identity.incarnation
        with pytest.raises(PeerRefused, match="already"):
            await cluster.add("echo-0")

    with_cluster(test)


def test_an_actor_gives_up_a_head_that_has_no_successor():
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0", head_back_s=0.3)
        cluster.kill_head()
        with pytest.raises(HeadLost, match="the head of the run is gone") as lost:
            await runtime.until_stopped()
        assert not lost.value.final

    with_cluster(test)


def test_an_actor_that_lost_its_link_first_is_not_gone_when_it_is_back():
    """The head still has the old link when the new one comes: a network that was cut on one side only."""
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0")
        before = runtime._head
        runtime.bus.link_over(before, "silent for 10 s")
        await until(lambda: runtime._head is not before and runtime._head.up)
        await asyncio.sleep(0.1)
        assert member_of(cluster, "echo-0").incarnation == runtime.bus.identity.incarnation
        assert not runtime.stopped.is_set() and not cluster.head.registry.membership().departed
        assert (await cluster.ask()).actor == "echo-0"

    with_cluster(test)


def test_what_is_told_while_the_head_is_away_reaches_the_next_one():
    async def test(cluster: SmallCluster) -> None:
        [runtime] = await ready(cluster, "echo-0")
        cluster.kill_head()
        leaving = asyncio.ensure_future(runtime.leave("it has done enough"))
        await asyncio.sleep(0.2)
        assert not runtime.stopped.is_set()
        await cluster.next_head()
        await leaving
        assert runtime.stopped.is_set()

    with_cluster(test)
