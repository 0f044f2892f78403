"""The loop of grpo in a controller that strikes in the midst of hand-overs. Who is hit is stopped first, so it
has been asked and has not answered when the stroke comes.

    STROKES=phase:victim:blow,…   phase: park, wake, take, cache, sleep, unpark   blow: kill, freeze, stop (of the job)

One after the other, each two steps after the one before: between two of them there is a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.job.job import Job
from cosmos_actor.recipes import grpo
from cosmos_actor.roles.engine import KV_CACHE, WEIGHTS
from cosmos_actor.roles.turn_messages import ParkRequest, SleepRequest, UnparkRequest, WakeRequest

FIRST_STEP = 7
"""After a checkpoint, and with steps to come."""
STILL_S = 0.3
"""From the question to the end of whoever is to answer."""
ending: list[int] = []
"""This controller, once it is to be killed: it goes on until then, and where steps are quick it would strike again, and
be gone before it killed whom it had stopped."""


def run(job: Job) -> None:
    hand_off: Any = job._hand_off
    answer, ask_policy, takes = hand_off._answer, hand_off._ask_policy, hand_off._takes_newest

    async def answered(link: Any, request: Any, *rest: Any) -> Any:
        strike(job, phase_of(request))
        return await answer(link, request, *rest)

    async def asked(request: Any, what: str) -> Any:
        strike(job, phase_of(request))
        return await ask_policy(request, what)

    async def taken(link: Any, until: float) -> None:
        strike(job, "take")
        await takes(link, until)

    hand_off._answer, hand_off._ask_policy, hand_off._takes_newest = answered, asked, taken
    grpo.run(job)


def phase_of(request: Any) -> str:
    if isinstance(request, WakeRequest):
        return {WEIGHTS: "wake", KV_CACHE: "cache"}[request.what[0]]
    return {ParkRequest: "park", SleepRequest: "sleep", UnparkRequest: "unpark"}[type(request)]


def strike(job: Job, now: str) -> None:
    mark, strokes = job.paths.root / "struck", os.environ["STROKES"].split(",")
    done = mark.stat().st_size if mark.exists() else 0
    if ending or done == len(strokes) or job.step_in_hand < FIRST_STEP + 2 * done:
        return
    phase, victim, blow = strokes[done].split(":")
    if now != phase:
        return
    mark.write_text("." * (done + 1))
    if blow == "stop":
        os.kill(os.getppid(), signal.SIGTERM)
        return
    pid = os.getpid() if victim == "controller" else [
        line["pid"] for line in read_json_lines(job.paths.events)
        if line["event"] == "started" and line["actor"] == f"{victim}-0"][-1]
    if victim == "controller":
        ending.append(pid)
    else:
        os.kill(pid, signal.SIGSTOP)
    if blow == "kill":
        asyncio.get_running_loop().call_later(STILL_S, os.kill, pid, signal.SIGKILL)
