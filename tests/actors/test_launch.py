"""Ranks under torch's elastic launcher belong to their actor like any other process of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.keeper import belonging
from cosmos_actor.actors.restart_policy import Restart
from tests.actors.supervised import Job
from tests.leaks import MARK

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, time
from cosmos_actor import death
death.install()
os.write(1, "rank {RANK} of {WORLD_SIZE} pid {0} here\\n".format(os.getpid(), **os.environ).encode())
"""
"""One write a line: the ranks share a log, and an unbuffered print (PYTHONUNBUFFERED) writes word by word."""


def ranks(code: str, count: int = 2, **fields: Any) -> ChildSpec:
    command = (sys.executable, "-m", "cosmos_actor.actors.launch", "--ranks", str(count), "--",
               sys.executable, "-c", RANK + code)
    return ChildSpec(actor="policy-0", role="policy", command=command, start_s=60.0, shutdown_s=10.0,
                     env={"PYTHONPATH": str(ROOT)}, **fields)


def pid_of(log: str, rank: int) -> int:
    return next(int(line.split()[5]) for line in log.splitlines() if line.startswith(f"rank {rank} of 2 pid"))


async def both_ranks(job: Job, life: int = 1) -> str:
    for rank in (0, 1):
        log = await job.logged("policy-0", f"rank {rank} of 2 pid", life=life)
    return log


def test_a_killed_rank_takes_the_others_along_and_is_named(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, ranks("time.sleep(600)")) as job:
            os.kill(pid_of(await both_ranks(job), 1), signal.SIGKILL)
            exited = await job.event("exited")
            assert exited["reason"] == "exit 1: error: rank 1 of 2 was killed by SIGKILL"
            started = await job.event("started", count=2)
            assert belonging(MARK) <= {job.supervisor._keeper.pid, started["pid"]}, "no rank of the first life is left"
            log = await both_ranks(job, life=2)
            rank_pids = {pid_of(log, 0), pid_of(log, 1)}
            assert all(os.getpgid(pid) != started["pid"] for pid in rank_pids), "each rank has a session of its own"
            os.kill(started["pid"], signal.SIGKILL)
            await job.event("exited", count=2)
            await job.event("started", count=3)
            assert not rank_pids & belonging(MARK), "a killed launcher leaves no rank"
        assert not belonging(MARK)

    asyncio.run(asyncio.wait_for(test(), 110))


@pytest.mark.slow
def test_a_stop_goes_through_the_launcher_to_the_ranks(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, ranks("time.sleep(600)")) as job:
            await both_ranks(job)
        assert job.of("exited")[-1]["reason"] == "stopped"
        assert not belonging(MARK)

    asyncio.run(asyncio.wait_for(test(), 110))


@pytest.mark.slow
def test_the_error_of_a_rank_is_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        code = "if os.environ['RANK'] == '1': raise ValueError('no such model')\ntime.sleep(600)"
        async with Job(tmp_path, ranks(code, restart=Restart.TEMPORARY)) as job:
            assert (await job.event("exited"))["reason"] == "exit 1: ValueError: no such model"

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.slow
def test_ranks_that_end_well_are_a_launcher_that_ends_well() -> None:
    command = [sys.executable, "-m", "cosmos_actor.actors.launch", "--ranks", "2", "--", sys.executable, "-c", RANK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.count("here") == 2, done.stderr


@pytest.mark.parametrize("wrong", [["--ranks", "2"], ["--ranks", "0", "--", "true"], ["--ranks", "1", "true"]])
def test_a_wrong_command_line_is_refused(wrong: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "cosmos_actor.actors.launch", *wrong], capture_output=True, text=True,
                          timeout=60, cwd=ROOT)
    assert done.returncode == 2 and "a command after -- are needed" in done.stderr
