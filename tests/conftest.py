"""What every part's tests share: processes that do not outlive their test, and a look for leaks after each module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from cosmos_actor.actors.event_loop import new_event_loop
from tests.leaks import Snapshot

# Times say something about a machine and its load, never about the code under test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

STOP_LIMIT_S = 5.0
# A killed process that is not gone by then is stuck in the kernel, and the test should say so rather than hang.


def open_what_stays_open() -> None:
    """libuv keeps a pipe from its first loop on for the process's whole life: no module is to be blamed for it."""
    loop = new_event_loop()
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()


open_what_stays_open()


def computes_on_a_gpu(session: pytest.Session) -> bool:
    """CUDA and NCCL keep pipes and sockets from their first use on, for a process's whole life, and leave names in
    /dev/shm when a process is killed, be it another worker's."""
    torch = sys.modules.get("torch")
    initialised = torch is not None and bool(torch.cuda.is_initialized())
    return initialised or any(item.get_closest_marker("gpu") for item in session.items)


@pytest.fixture(autouse=True, scope="module")
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module whose tests leave a process, a descriptor or a file in /dev/shm behind fails, with a list of them."""
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    if computes_on_a_gpu(request.session):
        leaks = [leak for leak in leaks if leak.startswith("process")]
    if leaks:
        pytest.fail(f"{request.node.name} left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def popen() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """`subprocess.Popen` whose processes (with their sessions) are killed when the test ends."""
    yield from owned_processes()


@pytest.fixture(scope="module")
def module_popen() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """As `popen`, for what all tests of a module share."""
    yield from owned_processes()


def owned_processes() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    started: list[subprocess.Popen[Any]] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, start_new_session=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait(STOP_LIMIT_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
