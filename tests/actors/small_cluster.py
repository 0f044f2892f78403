"""A head, a controller's fleet and small actors on one loop over the in-memory transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.fleet import Fleet
from cosmos_actor.actors.head import Head
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.runtime import ActorRuntime
from cosmos_actor.actors.worker import InlineWorker, Worker
from cosmos_actor.bus import Bus, Identity, MemoryNetwork, MemoryTransport, new_incarnation
from cosmos_actor.bus.schema import schema


@schema("test_question", version=1)
class Question:
    number: int


@schema("test_answer", version=1)
class Answer:
    number: int
    actor: str


HEAD = "memory://head"


class EchoRole(Role):
    """Answers with its name; `gate` holds every answer back until it is set."""

    name = "echo"
    gate: asyncio.Event | None = None

    @handles(Question, concurrency=8)
    async def answer(self, question: Question) -> Answer:
        if question.number < 0:
            raise ValueError("a negative number")
        if self.gate is not None:
            await self.gate.wait()
        return Answer(question.number, self.context.identity.actor)


class BrokenRole(EchoRole):
    def setup(self) -> None:
        raise RuntimeError("the model does not fit")


class SmallCluster:
    """Everything is closed by `close`, which also stops actors that were crashed."""

    def __init__(self, *, stateful: frozenset[str] = frozenset(), max_in_flight: int = 2, **fleet: Any) -> None:
        self.network = MemoryNetwork()
        self.journal: list[Any] = []
        self.head = self._head()
        self.bus = self._bus("controller", "controller-0")
        self.fleet = Fleet(self.bus, stateful=stateful, max_in_flight=max_in_flight, clock=SystemClock(),
                           **fleet)
        self.actors: dict[str, ActorRuntime] = {}
        self.settings: Any = None
        """What the roles of actors that are added from now on see."""

    async def open(self) -> SmallCluster:
        await self.head.start(HEAD)
        await self.bus.start("memory://controller")
        await self.bus.connect(HEAD, role="registry")
        return self

    def kill_head(self) -> None:
        """No goodbye: its wires break, nobody listens at its address."""
        bus = self.head.bus
        bus._ticker.cancel()
        bus.transport.close(0)

    async def next_head(self, *, return_s: float = 10.0) -> None:
        """One that knows the journal of the one before."""
        self.head = self._head(known=list(self.journal), return_s=return_s)
        await self.head.start(HEAD)

    async def add(
        self, actor: str, role: Callable[[Context], Role] = EchoRole, *, joined: bool = False,
        worker: Worker | None = None, blocked_s: float = 2.5, head_back_s: float = 30.0,
    ) -> ActorRuntime:
        """A new incarnation of `actor`, announced, its setup begun."""
        bus = self._bus(actor.rpartition("-")[0], actor)
        runtime = ActorRuntime(bus, role, self.settings, 7, worker=worker or InlineWorker(), clock=SystemClock(),
                               joined=joined, blocked_s=blocked_s, head_back_s=head_back_s)
        await runtime.start(HEAD, f"memory://{actor}/{bus.identity.incarnation}")
        runtime.begin()
        self.actors[actor] = runtime
        return runtime

    def crash(self, actor: str, reason: str = "killed by SIGKILL") -> None:
        """What the supervisor says when the process of `actor` is gone."""
        self.head.exited(actor, self.actors[actor].bus.identity.incarnation, reason)

    async def ask(self, number: int = 1, *, deadline_s: float = 5.0) -> Any:
        return await self.fleet.submit("echo", Question(number), deadline_s=deadline_s, what=f"question {number}")

    async def close(self) -> None:
        self.fleet.close()
        for runtime in self.actors.values():
            await runtime.close()
        await self.bus.close(drain_s=0.1)
        await self.head.bus.close(drain_s=0.1)

    def _head(self, **options: Any) -> Head:
        return Head(self._bus("registry", "registry-0"), {"run": {"seed": 7}}, 7, journal=self.journal.append,
                    **options)

    def _bus(self, role: str, actor: str) -> Bus:
        return Bus(Identity("run", role, actor, new_incarnation()), MemoryTransport(self.network), None)


def with_cluster(test: Callable[[SmallCluster], Any], **options: Any) -> None:
    """Run an async test on an open cluster, bounded in time."""

    async def run() -> None:
        cluster = await SmallCluster(**options).open()
        try:
            await asyncio.wait_for(test(cluster), 30.0)
        finally:
            await cluster.close()

    asyncio.run(run())
