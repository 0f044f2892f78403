"""A job in this process whose roles are played: they answer at once, or when a gate is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.actors.context import Context, SystemClock
from cosmos_actor.actors.handle import ThreadDriver
from cosmos_actor.actors.ledger import Ledger
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.actors.trajectory import GenerateTask
from cosmos_actor.job.job import Job
from cosmos_actor.job.journal import Journal
from cosmos_actor.job.roles import STATEFUL
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.messages import (
    Generation,
    GenerationRequest,
    Restored,
    RestoreRequest,
    ScoreRequest,
    Scores,
    Tasks,
    TasksRequest,
    scores_of,
)
from cosmos_actor.roles.replay_buffer import ReplayBufferRole
from cosmos_actor.roles.stateful import StatefulRole
from tests.actors.groups import make_group
from tests.actors.small_cluster import SmallCluster

FLAGS = ("data.prompts_per_step=2", "rollout.samples_per_prompt=3", "policy.sft_steps=0")


class Gate:
    """Open unless it was closed; counts who stands before it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.came = 0

    async def pass_through(self) -> None:
        self.came += 1
        await self.open.wait()


class Played:
    """One class of role for each name, all before the same gates: `gates["rollout"]` holds rollouts' answers."""

    def __init__(self) -> None:
        self.gates = {name: Gate() for name in ("data", "rollout", "reward")}

    def roles(self) -> dict[str, Callable[[Context], Role]]:
        gates = self.gates

        class Data(Role):
            @handles(TasksRequest, concurrency=4)
            async def tasks(self, request: TasksRequest) -> Tasks:
                await gates["data"].pass_through()
                mark = "r" if request.split == "replacement" else ""
                return Tasks([
                    GenerateTask(group_id=f"g{request.step:06d}-{mark}{place}", attempt=request.attempt, task={},
                                 prompt=np.zeros(2, np.int32), samples=request.samples, seed=place)
                    for place in range(request.prompts)])

        class Rollout(Role):
            @handles(GenerationRequest, concurrency=4)
            async def generate(self, request: GenerationRequest) -> Generation:
                await gates["rollout"].pass_through()
                groups = [make_group(group_id=task.group_id, attempt=task.attempt, version=request.version_dispatch)
                          for task in request.tasks]
                return Generation(groups, 0.1, 1, {})

        class Reward(Role):
            @handles(ScoreRequest, concurrency=4)
            async def score(self, request: ScoreRequest) -> Scores:
                await gates["reward"].pass_through()
                return scores_of([np.ones(3, np.float32)] * len(request.groups), self.context.identity.actor, 0.1)

        class Policy(StatefulRole):
            name = "policy"

            @handles(RestoreRequest)
            def restore(self, request: RestoreRequest) -> Restored:
                self.begin_life(request.epoch)
                return Restored("policy", request.step)

        return {"data": Data, "rollout": Rollout, "reward": Reward, "replay_buffer": ReplayBufferRole,
                "policy": Policy}


class SmallJob:
    """A job and its actors, whose loop turns in a thread; the test is the recipe."""

    def __init__(self, folder: Path, driver: ThreadDriver, flags: Sequence[str] = (), *, takes_turns: bool = False,
                 others: Mapping[str, Callable[[Context], Role]] | None = None) -> None:
        """`others` are played in the place of those of their name."""
        self._driver, self._flags, self._takes_turns, self._others = driver, flags, takes_turns, others or {}
        self.job = driver.start(self._open(RunPaths(folder))).result(30.0)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it on the loop."""
        async def call() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return self._driver.start(call()).result(30.0)

    def close(self) -> None:
        self.job.close()
        self.do(self.cluster.close)

    @property
    def buffered_groups(self) -> int:
        return len(self.cluster.actors["replay_buffer-0"].role.buffer)

    async def _open(self, paths: RunPaths) -> Job:
        settings = resolve("grpo-arithmetic", [*FLAGS, *self._flags])
        self.cluster = SmallCluster(stateful=STATEFUL)
        self.cluster.settings = settings
        played = Played()
        self.gates = played.gates
        clock = SystemClock()
        job = Job(settings, bus=self.cluster.bus, fleet=self.cluster.fleet, driver=self._driver, clock=clock,
                  paths=paths, ledger=Ledger(paths.ledger), journal=Journal(paths.metrics, clock),
                  takes_turns=self._takes_turns)
        job.weights.vouch = lambda made: None  # nothing is published here
        await self.cluster.open()
        for name, role in {**played.roles(), **self._others}.items():
            await self.cluster.add(f"{name}-0", role)
        return job


@contextmanager
def small_job(folder: Path, *flags: str, **options: Any) -> Iterator[SmallJob]:
    driver = ThreadDriver()
    try:
        made = SmallJob(folder, driver, flags, **options)
        yield made
        made.close()
    finally:
        driver.close()
        driver.loop.close()
