"""A real job with a prompt that kills whoever judges it: the run goes on, the message is kept, the ledger balances."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cosmos_actor.actors.dead_letters import quarantine_of, read_dead_letters
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.job.quarantined import load_quarantined
from cosmos_actor.roles.messages import ScoreRequest, UpdateRequest
from tests.job.runs import COMMAND, JOB_S, Run, environment
from tests.project.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TASK = 'data.task="tests.job.mortal_task:poisoned"'
TRAINED = 6 * 8 * 4
CHUNK = 4 * 4
"""Trajectories of the message that is lost: a chunk of prompts with their samples."""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def command(run: Run, *words: str) -> str:
    done = subprocess.run([*COMMAND, "dead-letters", str(run.directory), *words], capture_output=True, text=True,
                          timeout=60, check=True, env=environment())
    return done.stdout


@pytest.mark.parametrize(("shortfall", "trained"), [("replace", TRAINED), ("short", TRAINED - CHUNK)])
def test_a_prompt_that_kills_its_grader_costs_its_chunk_and_nothing_else(run, shortfall, trained):
    """No array by reference: what a dying grader had lent would be made again, and that is another test."""
    run.finish(sets=[TASK, f"limiter.shortfall={shortfall}", "bulk.threshold_bytes=65536"])
    assert [line["step"] for line in run.metrics() if "loss/total" in line] == list(range(1, 11))
    restarts = run.events("restarting")
    assert [(event["actor"], event["reason"]) for event in restarts] == [("reward-0", "killed by SIGKILL")] * 2
    assert run.balance() == {
        "dispatched": TRAINED + (CHUNK if shortfall == "replace" else 0), "trained": trained,
        "dropped": {"quarantined": CHUNK}, "buffered": 0, "in_flight": 0, "balanced": True}

    paths = RunPaths(run.directory)
    [letter] = read_dead_letters(paths)
    assert (letter["kind"], letter["role"], letter["message"]) == ("quarantined", "reward", "score_request/1")
    assert letter["groups"] == [f"g000006-{place:04d}" for place in range(4)]
    assert len({victim["incarnation"] for victim in letter["killed"]}) == 2
    message = load_quarantined(quarantine_of(paths) / f"{letter['quarantine']}.msgpack")
    assert isinstance(message, ScoreRequest) and [group.task["bad"] for group in message.groups].count(True) == 1
    for group in message.groups:
        group.check()
        assert isinstance(group.tokens, np.ndarray) and group.samples == 4

    assert json.loads(command(run, "--json")) == [letter]
    assert letter["what"] in command(run)
    shown = json.loads(command(run, "--show", letter["quarantine"], "--json"))
    assert shown["content"]["groups"][1]["tokens"] == message.groups[1].tokens.tolist()


def test_a_quarantined_message_is_whole_also_when_its_arrays_travelled_by_reference(run):
    """The dying grader may take arrays along that it had lent: what they were part of is judged again."""
    run.finish(sets=[TASK, "limiter.shortfall=short", "bulk.threshold_bytes=1"])
    balance = run.balance()
    assert balance["balanced"] and balance["dropped"]["quarantined"] >= CHUNK and balance["in_flight"] == 0
    letter = read_dead_letters(RunPaths(run.directory))[0]
    message = load_quarantined(quarantine_of(RunPaths(run.directory)) / f"{letter['quarantine']}.msgpack")
    assert [group.task["bad"] for group in message.groups].count(True) == 1
    for group in message.groups:
        group.check()
        assert isinstance(group.tokens, np.ndarray) and group.samples == 4


DEADLY_POLICY = """
import os, signal, sys
if "cosmos_actor.job.actor" in sys.orig_argv:
    from cosmos_actor.trainer.policy import PolicyTrainer
    step = PolicyTrainer.policy_step
    def policy_step(self, *arguments):
        if self.updates["policy"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *arguments)
    PolicyTrainer.policy_step = policy_step
"""


def test_an_update_that_kills_the_policy_in_two_lives_ends_the_job_with_its_name(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DEADLY_POLICY)
    process = run.start(sets=[f'policy.env={{PYTHONPATH="{tmp_path}:{ROOT}"}}', "policy.sft_steps=1"])
    assert process.wait(2 * JOB_S) == 1, run.output.read_text()
    assert "error: policy update 4 killed 2 actors of role policy (policy-0: killed by SIGKILL; policy-0" in (
        run.output.read_text())
    assert len(run.events("rewind")) == 2 and run.balance()["balanced"]
    [letter] = read_dead_letters(RunPaths(run.directory))
    path: Path = quarantine_of(RunPaths(run.directory)) / f"{letter['quarantine']}.msgpack"
    message = load_quarantined(path)
    assert isinstance(message, UpdateRequest) and message.step == 4 and len(message.groups) == 8
