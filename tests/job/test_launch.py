"""A stop lets the step in hand finish when there is one, and is never lost when there is none."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.bus import KeyRing
from cosmos_actor.job.controller import DRAIN_SIGNAL
from cosmos_actor.job.launch import Launch, _run_keys, refuse_without_simulator
from cosmos_actor.job.starts import Starts


class PlayedSupervisor:
    def __init__(self, state: str) -> None:
        self.state = state
        self.stopped: list[str] = []

    def children(self) -> list[dict[str, Any]]:
        return [{"role": "controller", "state": self.state, "pid": 4711}]

    async def stop(self, reason: str) -> None:
        self.stopped.append(reason)


def signalled(state: str, times: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], list[str]]:
    """(signals to the controller, stops of the supervisor) after `times` SIGTERM in this state of the controller."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append((pid, number)))
    launch = object.__new__(Launch)
    supervisor = launch._supervisor = PlayedSupervisor(state)
    launch._stopping = None
    launch._observer = SimpleNamespace(notice=lambda text: None)
    launch._settings = SimpleNamespace(supervisor=SimpleNamespace(drain_s=60.0))

    async def run() -> None:
        for _ in range(times):
            launch._asked_to_stop("SIGTERM")
        await asyncio.sleep(0)

    asyncio.run(run())
    return kills, supervisor.stopped


def test_a_ready_controller_is_asked_to_finish_its_step(monkeypatch):
    assert signalled("ready", 1, monkeypatch) == ([(4711, DRAIN_SIGNAL)], [])


def test_a_controller_that_is_starting_would_be_killed_by_that_signal_so_all_is_stopped_at_once(monkeypatch):
    assert signalled("starting", 1, monkeypatch) == ([], ["stopped at once by SIGTERM"])


def test_a_second_signal_stops_everything_at_once(monkeypatch):
    assert signalled("ready", 2, monkeypatch) == ([(4711, DRAIN_SIGNAL)], ["stopped at once by SIGTERM"])


@pytest.mark.parametrize(("damage", "words"), [
    (lambda key: key.write_bytes(b"\x00" * 64), "rollout.key is not a key file; or delete it"),
    (lambda key: key.chmod(0o644), "chmod 600; or delete it, then the next start makes new keys"),
])
def test_a_key_that_can_not_be_used_is_named_before_anything_starts(tmp_path, damage, words):
    directory = SimpleNamespace(keys=tmp_path / "keys", run_id="run-1")
    keys = _run_keys(directory)
    damage(keys["rollout"])
    with pytest.raises(UserError, match=words):
        _run_keys(directory)
    keys["rollout"].unlink()
    assert KeyRing.load(_run_keys(directory)["rollout"]).run_id == "run-1"


@pytest.mark.parametrize(("last_word", "why"), [
    (None, "no actor of role controller answers"), ("it is through", "took longer than supervisor.drain_s")])
def test_a_controller_that_is_through_and_leaves_is_not_mute(last_word, why):
    """It says goodbye some moments before its process ends; only one that has not said its last word is missed."""
    launch = object.__new__(Launch)
    supervisor = launch._supervisor = PlayedSupervisor("ready")
    launch._settings = SimpleNamespace(supervisor=SimpleNamespace(drain_s=0.6))
    async def mute_role(seconds: float) -> str:
        return "controller"

    launch._registry = SimpleNamespace(mute_role=mute_role)
    launch._last_word = last_word
    asyncio.run(launch._stop_after_drain("SIGTERM"))
    assert len(supervisor.stopped) == 1 and why in supervisor.stopped[0]


@pytest.mark.parametrize(("role", "ready", "ends"), [
    ("simulator", True, False), ("simulator", False, True), ("policy", True, True)])
def test_somebody_who_takes_the_name_of_a_simulator_that_has_attached_does_not_end_the_job(role, ready, ends):
    launch = object.__new__(Launch)
    launch._registry = SimpleNamespace(exited=lambda incarnation, reason: None)
    launch._supervisor = SimpleNamespace(children=lambda: [{"actor": "one-0", "role": role}])
    launch._starts, verdicts = Starts(), []
    launch._end = lambda code, reason: verdicts.append(code)
    if ready:
        launch._starts.served("one-0", "1-a")
    launch._on_event({"event": "exited", "actor": "one-0", "incarnation": "1-a", "reason": "another process",
                      "outcome": "abnormal", "exit_code": 2})
    assert verdicts == [2] * ends


@pytest.mark.parametrize(("sim", "rollouts", "setting"), [(0, 1, "sim.count"), (1, 2, "rollout.count"), (1, 1, "")])
def test_in_one_process_a_rollout_without_a_simulator_is_refused(sim, rollouts, setting):
    settings = SimpleNamespace(run=SimpleNamespace(experience="simulator"), sim=SimpleNamespace(count=sim),
                               rollout=SimpleNamespace(count=rollouts))
    if not setting:
        refuse_without_simulator(settings)
        return
    with pytest.raises(UserError) as caught:
        refuse_without_simulator(settings)
    assert caught.value.setting == setting
