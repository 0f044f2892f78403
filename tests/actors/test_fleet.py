"""A question ends answered, failed by its role, past its deadline, or as lost state; it is never silently gone."""

from __future__ import annotations

import asyncio

import pytest

from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.messages import StopActor
from cosmos_actor.actors.role import handles
from cosmos_actor.bus import DeadlineExceeded, RemoteError
from tests.actors.small_cluster import Answer, EchoRole, Question, SmallCluster, with_cluster


def held() -> type[EchoRole]:
    """A role that answers once its `gate` is set."""
    return type("HeldRole", (EchoRole,), {"gate": asyncio.Event()})


async def asked(cluster: SmallCluster, actor: str) -> None:
    """Until a question is with `actor`."""
    while not cluster.fleet.members("echo").get(actor, {}).get("in_flight"):
        await asyncio.sleep(0.001)


def test_a_question_goes_to_a_member_and_comes_back():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0")
        answer = await cluster.ask(5)
        assert (answer.number, answer.actor) == (5, "echo-0")

    with_cluster(test)


def test_work_is_spread_over_all_members():
    async def test(cluster: SmallCluster) -> None:
        for name in ("echo-0", "echo-1", "echo-2"):
            await cluster.add(name)
        await cluster.fleet.wait_for_members("echo", 3, 5.0)
        answers = await asyncio.gather(*(cluster.ask(number) for number in range(30)))
        assert {answer.actor for answer in answers} == {"echo-0", "echo-1", "echo-2"}
        assert sorted(answer.number for answer in answers) == list(range(30))

    with_cluster(test)


def test_a_question_waits_for_a_member_that_comes_later():
    async def test(cluster: SmallCluster) -> None:
        question = asyncio.ensure_future(cluster.ask(1))
        await asyncio.sleep(0)
        assert not question.done()
        await cluster.add("echo-0")
        assert (await question).actor == "echo-0"

    with_cluster(test)


def test_a_member_that_dies_as_a_question_wakes_for_it_is_waited_for_again():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0")
        await cluster.fleet.wait_for_members("echo", 1, 5.0)
        wait, [link] = cluster.fleet._wait, cluster.fleet.links("echo").values()
        waits: list[str] = []

        async def wait_and_lose_it(*arguments, **options) -> None:
            await wait(*arguments, **options)
            if not waits:
                cluster.fleet._on_link_down(link, "no heartbeat")
            waits.append("over")

        cluster.fleet._wait = wait_and_lose_it
        assert (await cluster.ask(3)).number == 3 and len(waits) == 2

    with_cluster(test)


def test_an_error_of_the_role_comes_back_by_name_and_is_not_tried_elsewhere():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0")
        with pytest.raises(RemoteError, match="ValueError: a negative number"):
            await cluster.ask(-1)
        assert cluster.fleet.redelivered == {}

    with_cluster(test)


def test_without_a_member_the_deadline_names_the_role_and_the_question():
    async def test(cluster: SmallCluster) -> None:
        with pytest.raises(DeadlineExceeded, match=r"free actor of role echo for question 1.*echo\.count"):
            await cluster.ask(1, deadline_s=0.05)

    with_cluster(test)


def test_the_work_of_a_dead_member_is_given_to_another():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0", held())
        question = asyncio.ensure_future(cluster.ask(1))
        await asked(cluster, "echo-0")
        await cluster.add("echo-1")
        cluster.crash("echo-0")
        assert (await question).actor == "echo-1"
        assert cluster.fleet.redelivered == {"echo": 1}

    with_cluster(test)


def test_a_restarted_incarnation_takes_the_work_of_the_dead_one():
    async def test(cluster: SmallCluster) -> None:
        dead = await cluster.add("echo-0", held())
        question = asyncio.ensure_future(cluster.ask(1))
        await asked(cluster, "echo-0")
        cluster.crash("echo-0")
        await cluster.add("echo-0")
        assert (await question).actor == "echo-0"
        await dead.close()

    with_cluster(test)


@pytest.mark.parametrize("in_the_middle", [True, False], ids=["while it was asked", "between two questions"])
def test_the_death_of_a_stateful_member_is_lost_state_until_the_job_has_gone_back(in_the_middle):
    async def test(cluster: SmallCluster) -> None:
        dead = await cluster.add("echo-0", held() if in_the_middle else EchoRole)
        await cluster.fleet.wait_for_members("echo", 1, 5.0)
        question = asyncio.ensure_future(cluster.ask(1)) if in_the_middle else None
        await asyncio.sleep(0.01)
        cluster.crash("echo-0", "killed by SIGKILL")
        if question is not None:
            with pytest.raises(StateLost, match="echo-0 is gone with what it held: .*killed by SIGKILL"):
                await question
        while cluster.fleet.lost is None:
            await asyncio.sleep(0.001)  # the head tells of it a moment later
        await cluster.add("echo-0")
        with pytest.raises(StateLost, match="killed by SIGKILL"):
            await cluster.ask(2)
        cluster.fleet.state_is_fresh()
        assert (await cluster.ask(3)).number == 3
        await dead.close()

    with_cluster(test, stateful=frozenset({"echo"}))


def test_a_leaving_member_finishes_what_it_holds_and_gets_nothing_new():
    async def test(cluster: SmallCluster) -> None:
        gated = held()
        leaver = await cluster.add("echo-0", gated, joined=True)
        first = asyncio.ensure_future(cluster.ask(1))
        await asked(cluster, "echo-0")
        leaving = asyncio.ensure_future(leaver.leave("enough"))
        await cluster.add("echo-1")
        while not cluster.fleet._members["echo-0"].leaving or len(cluster.fleet.members("echo")) < 2:
            await asyncio.sleep(0.001)  # the head tells of it a moment later
        assert (await cluster.ask(2)).actor == "echo-1"
        gated.gate.set()
        assert (await first).actor == "echo-0"
        await leaving
        assert cluster.fleet.redelivered == {}

    with_cluster(test)


class UnfitRole(EchoRole):
    """What others can do it can not."""

    @handles(Question, concurrency=8)
    async def answer(self, question: Question) -> Answer:
        raise Unfit("no memory for it here")


class Unfit(Exception):
    pass


def test_who_joined_and_can_not_do_what_others_can_is_dismissed_and_another_does_it():
    async def test(cluster: SmallCluster) -> None:
        told: list[tuple[str, str]] = []
        cluster.fleet.on_dismissed = lambda member, reason: told.append((member.actor, reason))
        unfit = await cluster.add("echo-0", UnfitRole, joined=True)
        await cluster.fleet.wait_for_members("echo", 1, 5.0)
        questions = [asyncio.ensure_future(cluster.ask(number)) for number in range(2)]
        await asyncio.wait_for(unfit.until_stopped(), 5.0)
        await cluster.add("echo-1")
        assert {answer.actor for answer in await asyncio.gather(*questions)} == {"echo-1"}
        assert told == [("echo-0", "no memory for it here")] and cluster.fleet.redelivered == {"echo": 2}
        while set(cluster.fleet.links("echo")) != {"echo-1"}:
            await asyncio.sleep(0.001)  # it is forgotten once it has answered that it ends

    with_cluster(test, unfit=frozenset({"Unfit"}))


def test_what_a_mute_member_that_is_dismissed_has_in_hand_is_done_by_another():
    async def is_mute(message: StopActor, deadline_s: float) -> None:
        raise DeadlineExceeded(f"no answer to {message.reason}")

    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0", held(), joined=True)
        question = asyncio.ensure_future(cluster.ask(1))
        await asked(cluster, "echo-0")
        link = cluster.fleet.links("echo")["echo-0"]
        link.call = is_mute
        await cluster.add("echo-1")
        assert cluster.fleet.dismiss(link, "it does not get on")
        assert (await question).actor == "echo-1"
        await asyncio.sleep(0.05)
        assert set(cluster.fleet.links("echo")) == {"echo-1"}, "it is not dialled again while the head knows it"

    with_cluster(test)


def test_an_actor_of_the_run_is_not_dismissed():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0", UnfitRole)
        with pytest.raises(RemoteError, match="no memory for it here"):
            await cluster.ask(1)
        assert not cluster.fleet.dismiss(cluster.fleet.links("echo")["echo-0"], "it does not get on")
        assert cluster.fleet.redelivered == {}

    with_cluster(test, unfit=frozenset({"Unfit"}))


def test_nothing_needs_to_be_done_about_a_life_that_is_over():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0", joined=True)
        await cluster.ask(1)
        link = cluster.fleet.links("echo")["echo-0"]
        cluster.bus.link_over(link, "no heartbeat")
        assert (await cluster.ask(2)).actor == "echo-0"  # over a new link
        assert cluster.fleet.dismiss(link, "it did not get on then")
        assert (await cluster.ask(3)).actor == "echo-0"

    with_cluster(test)


def test_a_member_with_its_hands_full_gets_no_more():
    async def test(cluster: SmallCluster) -> None:
        gated = held()
        await cluster.add("echo-0", gated)
        await cluster.fleet.wait_for_members("echo", 1, 5.0)
        questions = [asyncio.ensure_future(cluster.ask(number)) for number in range(5)]
        await asyncio.sleep(0.05)
        assert cluster.fleet.members("echo")["echo-0"]["in_flight"] == 2
        gated.gate.set()
        assert [answer.number for answer in await asyncio.gather(*questions)] == list(range(5))

    with_cluster(test, max_in_flight=2)


def test_a_link_that_broke_is_dialled_again_while_the_head_knows_the_actor():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0")
        assert (await cluster.ask(1)).actor == "echo-0"
        link = cluster.fleet.links("echo")["echo-0"]
        cluster.bus.link_over(link, "no heartbeat")
        assert (await cluster.ask(2)).actor == "echo-0"
        assert cluster.fleet.links("echo")["echo-0"] is not link

    with_cluster(test)


def test_a_loss_that_is_noticed_late_does_not_spoil_what_was_restored():
    async def test(cluster: SmallCluster) -> None:
        await cluster.add("echo-0")
        await cluster.ask(1)
        seat = cluster.fleet._seats["echo-0"]
        cluster.bus.link_over(seat.link, "no heartbeat")
        while cluster.fleet.lost is None:
            await asyncio.sleep(0.001)
        cluster.fleet.state_is_fresh()
        await cluster.fleet._member_lost(seat, "its receipt says so too")
        assert cluster.fleet.lost is None

    with_cluster(test, stateful=frozenset({"echo"}))
