"""Plug-ins for jobs of tests: a source, drivers, and sinks of which some misbehave."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from cosmos_actor.roles.collector import Collector
from cosmos_actor.roles.unit_source import Source, in_turn
from cosmos_actor.simulator_bridge.contract import TaskSpec

TOP = 7


def backwards(tasks: list[TaskSpec], seed: int) -> Source:
    """A source: the tasks in the other order."""
    return in_turn(tasks[::-1], seed)


class Twice(Collector):
    """A driver that begins every unit of the source twice, one after the other."""

    def __init__(self, gateway: Any, acting: Any, leases: Any, source: Source, *more: Any, **named: Any) -> None:
        super().__init__(gateway, acting, leases, lambda number: source(number // 2), *more, **named)


class Deadly(Collector):
    """A driver whose process dies of the fragments that step 3 asks for first."""

    async def collect(self, tasks: Any) -> list[dict[str, Any]]:
        if any(task.group_id == "f000003-0000" for task in tasks):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().collect(tasks)


class Namespace:
    twice = Twice


def no_driver(*arguments: Any, **more: Any) -> object:
    return object()


class Lines:
    """A sink that appends to sink.jsonl of the run directory, under the process that it is in."""

    def __init__(self, settings: Any, directory: Path) -> None:
        self.name = settings.run.name
        self.file = open(directory / "sink.jsonl", "a", buffering=1)

    def __call__(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps({**record, "pid": os.getpid()}) + "\n")

    def close(self) -> None:
        self.file.write(json.dumps({"closed": True, "pid": os.getpid()}) + "\n")
        self.file.close()


def raising(settings: Any, directory: Path) -> Any:
    def sink(record: dict[str, Any]) -> None:
        raise ConnectionError("the tracker\nis down")

    return sink


def hanging(settings: Any, directory: Path) -> Any:
    return lambda record: time.sleep(3600)


def no_sink(settings: Any, directory: Path) -> int:
    return 3
