"""A supervisor with real processes, and waiting for its events with a deadline."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.restart_policy import RestartLimits
from cosmos_actor.actors.run_directory import RunDirectory
from cosmos_actor.actors.supervisor import Event, Supervisor

EVENT_LIMIT_S = 45.0
# generous, because torch takes ten seconds to load where every core has four takers
SLEEPER = "from cosmos_actor import death; death.install(); print('here', flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER

MEMORY = """
from cosmos_actor import death; death.install()
from multiprocessing import get_context, resource_tracker, shared_memory
from cosmos_actor.roles.vllm_plugin.names import mark_names
mark_names()
made = shared_memory.SharedMemory(create=True, size=4096)
held = get_context("spawn").Lock()
lock = held._semlock.name
resource_tracker.unregister(made._name, "shared_memory")  # it might live long enough to take the names away itself
resource_tracker.unregister(lock, "semaphore")
import os, subprocess, sys
# as torch calls what it counts its CUDA handles in
counting = "import os, time; name = f'torch_{os.getpid()}_2686888608_0'; open('/dev/shm/' + name, 'w').close(); "
counting += "print(name, flush=True); time.sleep(600)"
counts = subprocess.Popen([sys.executable, "-c", counting], stdout=subprocess.PIPE, text=True).stdout.readline().strip()
print("here", made.name, "sem." + lock[1:], counts, flush=True); import time; time.sleep(600)
"""


def python(code: str, actor: str = "worker-0", *, interpreter: str = sys.executable, **fields: Any) -> ChildSpec:
    """A child that runs `code`. Test children find the package where the tests do."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), **fields.pop("env", {})}
    return ChildSpec(**{"actor": actor, "role": actor.rpartition("-")[0], "command": (interpreter, "-c", code),
                        "env": env, "start_s": 20.0, "shutdown_s": 5.0, **fields})


class Job:
    """A supervisor in a fresh run directory. Children are marked ready once they started, unless `ready` says no."""

    def __init__(self, folder: Path, *specs: ChildSpec, ready: Callable[[str], bool] = lambda actor: True,
                 limits: RestartLimits | None = None, **options: Any) -> None:
        self.directory = RunDirectory.create(folder / "run", "digest", run_id="run-1")
        self.supervisor = Supervisor(specs, run_directory=self.directory, limits=limits, on_event=self._take, **options)
        self.events: list[Event] = []
        self.seen_at: list[float] = []
        self._ready = ready
        self._news = asyncio.Event()

    async def __aenter__(self) -> Job:
        await self.supervisor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop("the test is over")
        self.directory.close()

    async def event(self, name: str, actor: str | None = None, *, count: int = 1) -> Event:
        """The `count`-th event of that name (of that actor), now or within the limit."""
        async with asyncio.timeout(EVENT_LIMIT_S):
            while len(found := self.of(name, actor)) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def logged(self, actor: str, text: str, *, life: int = 1) -> str:
        """The log of an actor's life once `text` is in it."""
        started = await self.event("started", actor, count=life)
        log = self.directory.log(actor, started["incarnation"])
        async with asyncio.timeout(EVENT_LIMIT_S):
            while text not in (content := log.read_text()):
                await asyncio.sleep(0.01)
        return content

    def of(self, name: str, actor: str | None = None) -> list[Event]:
        return [event for event in self.events if event["event"] == name and actor in (None, event.get("actor"))]

    def order(self, *names: str) -> list[str]:
        return [f"{event['event']} {event['actor']}" for event in self.events if event["event"] in names]

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self.seen_at.append(time.monotonic())
        self._news.set()
        if event["event"] == "started" and self._ready(event["actor"]):
            self.supervisor.mark_ready(event["actor"], event["incarnation"])
