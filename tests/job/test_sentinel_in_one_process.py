"""The sentinel beside a real head and real actors on one loop, with short limits: reports, pauses, and the kill."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.actors import stacks
from cosmos_actor.actors.messages import READY
from cosmos_actor.actors.role import handles
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.actors.wait_graph import graph_of, lines
from cosmos_actor.actors.worker import ThreadWorker
from cosmos_actor.job.sentinel import Sentinel
from tests.actors.small_cluster import Answer, EchoRole, Question, SmallCluster, with_cluster


class HangingRole(EchoRole):
    """Waits for `go` in the worker when it is asked for number 1; for 2, inside a declared pause."""

    def setup(self) -> None:
        self.go = threading.Event()

    @handles(Question)
    def answer(self, question: Question) -> Answer:
        if question.number == 1:
            self.go.wait(20.0)
        if question.number == 2:
            with self.context.busy("a compile", 60.0):
                self.go.wait(20.0)
        return Answer(question.number, self.context.identity.actor)


class Watched:
    """A sentinel over a cluster with one hanging actor, and what it did."""

    def __init__(self, cluster: SmallCluster, directory: RunDirectory, runtime: ActorRuntime, **limits: Any) -> None:
        self.runtime, self.cluster, self._directory = runtime, cluster, directory
        self.events: list[dict[str, Any]] = []
        self.kills: list[tuple[str, str]] = []
        section = {"stuck_s": 20.0, "heartbeat_s": 0.8, "no_progress_s": 100.0, "on_stuck": "report", **limits}
        self.sentinel = Sentinel(
            cluster.head, directory, self.children, SimpleNamespace(**section),
            lambda actor, incarnation, reason: self.kills.append((actor, reason)),
            SimpleNamespace(append=self.events.append),
            self._dump)

    async def _dump(self, title: str) -> bool:
        stacks.own(self._directory.supervisor_stacks, title)
        return True

    def children(self) -> list[dict[str, Any]]:
        return [{"actor": "echo-0", "role": "echo", "state": "ready", "pid": None,
                 "incarnation": self.runtime.bus.identity.incarnation}]

    def ask(self, number: int) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(self.cluster.ask(number, deadline_s=20.0))

    async def until(self, look: Callable[[], Any]) -> None:
        while not look():
            await asyncio.sleep(0.01)


def with_watched(test: Callable[[Watched], Any], folder: Any, **limits: Any) -> None:
    async def run(cluster: SmallCluster) -> None:
        with RunDirectory.create(folder / "run", "digest", run_id="run") as directory:
            runtime = await cluster.add("echo-0", HangingRole, worker=ThreadWorker("echo"), blocked_s=0.4)
            watched = Watched(cluster, directory, runtime, **limits)
            await watched.until(lambda: runtime.state == READY)
            sentinel = asyncio.get_running_loop().create_task(watched.sentinel.run())
            try:
                await test(watched)
            finally:
                runtime.role.go.set()
                sentinel.cancel()

    with_cluster(run)


def test_a_blocked_handler_is_reported_named_by_why_and_reported_again_when_it_goes_on(tmp_path):
    async def test(watched: Watched) -> None:
        question = watched.ask(1)
        await watched.until(lambda: watched.events)
        event = watched.events[0]
        assert (event["event"], event["actor"], event["kind"]) == ("stuck", "echo-0", "blocked")
        assert event["reason"].startswith("answer makes no progress for")
        text = lines(graph_of(watched.sentinel.facts()))
        assert text[1].startswith("  echo-0 is blocked in answer for") and "test_question of controller-0" in text[1]
        watched.runtime.role.go.set()
        assert (await question).number == 1
        await watched.until(lambda: watched.events[-1]["event"] == "goes_on")
        assert watched.kills == []

    with_watched(test, tmp_path)


def test_one_in_a_declared_pause_is_neither_reported_nor_killed_and_its_peers_know(tmp_path):
    async def test(watched: Watched) -> None:
        question = watched.ask(2)
        await watched.until(lambda: watched.runtime.context.in_hand.paused()[0] == "a compile")
        link = watched.cluster.bus.links["echo-0"]
        await watched.until(lambda: link.liveness.busy_label == "a compile")
        await asyncio.sleep(1.2)
        assert watched.events == watched.kills == []
        stands = graph_of(watched.sentinel.facts()).nodes["echo-0"]
        assert stands.standing == "paused" and "a declared pause for a compile" in stands.text
        watched.runtime.role.go.set()
        await question
        await watched.until(lambda: link.liveness.busy_label == "")

    with_watched(test, tmp_path, on_stuck="kill", no_progress_s=0.6)


def test_where_it_is_asked_for_one_that_does_not_get_on_is_killed_with_its_reason(tmp_path):
    async def test(watched: Watched) -> None:
        watched.ask(1).add_done_callback(lambda task: task.exception())
        await watched.until(lambda: watched.kills)
        [(actor, reason), *_] = watched.kills
        assert actor == "echo-0" and reason.startswith("stuck: answer makes no progress for")

    with_watched(test, tmp_path, on_stuck="kill")


def test_the_registry_itself_is_no_member_and_yet_not_missed(tmp_path):
    async def test(watched: Watched) -> None:
        registry = {"actor": "registry-0", "role": "registry", "state": "ready", "pid": 1, "incarnation": "1-r"}
        actors = watched.children()
        watched.sentinel._children = lambda: [registry, *actors]
        assert watched.sentinel.mute_role(3.0) == ""
        assert [child["actor"] for child in watched.sentinel.more()["children"]] == ["echo-0"]
        assert "registry-0" not in graph_of(watched.sentinel.facts()).nodes

    with_watched(test, tmp_path)


def test_a_standstill_names_who_waits_for_whom_and_leaves_stacks(tmp_path):
    async def test(watched: Watched) -> None:
        watched.ask(1).add_done_callback(lambda task: task.exception())
        await watched.until(lambda: any(event["event"] == "standstill" for event in watched.events))
        event = watched.events[-1]
        assert event["why"].startswith("echo-0 is blocked in answer")
        own = (tmp_path / "run" / event["stacks"][0]).read_text()
        assert "nothing got done for" in own and "in answer" in own  # all of this test is one process

    with_watched(test, tmp_path, no_progress_s=1.0)


@pytest.mark.parametrize("thread", ["worker", "loop"])
def test_a_pause_is_declared_before_its_code_runs_from_either_thread(tmp_path, thread):
    async def test(watched: Watched) -> None:
        context, bus, seen = watched.runtime.context, watched.runtime.bus, []

        def look() -> None:
            with context.busy("a checkpoint", 30.0):
                seen.append(bus.busy_label)
            seen.append(bus.busy_label)

        if thread == "loop":
            look()
        else:
            await context.compute("save", look)
        assert seen == ["a checkpoint", ""]

    with_watched(test, tmp_path)
