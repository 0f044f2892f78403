"""`dead-letters` lists what was given up and prints what is in quarantine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from cosmos_actor.actors.dead_letters import DeadLetters, letter, quarantine_of
from cosmos_actor.actors.poison import Victim
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.bus import DeadlineExceeded
from cosmos_actor.roles.messages import GenerationRequest, ScoreRequest
from tests.actors.groups import make_group
from tests.cli.conftest import Cli
from tests.cli.sample_run import make_run

NAME = "0001-reward-score_request"
KILLED = (Victim("reward-0", "1-a", "killed by SIGKILL"), Victim("reward-0", "2-b", "killed by SIGKILL"))


@pytest.fixture
def run(here: Path) -> RunPaths:
    """A run with one message in quarantine and one that nobody took in time."""
    paths = RunPaths(make_run(here / "run"))
    letters = DeadLetters(paths, lambda: 1.75e9)
    asyncio.run(letters.quarantine(ScoreRequest([make_group(3)]), None, role="reward", what="rewards", killed=KILLED))
    letters.add(letter(DeadlineExceeded("waited in vain"), GenerationRequest([], 0, 0, False, 1.0), role="rollout",
                       what="32 prompts of step 7", present=0))
    return paths


def test_a_run_that_gave_nothing_up_says_so(cli: Cli, here: Path) -> None:
    make_run(here / "run")
    assert "nothing was given up" in cli("dead-letters", "run").out
    assert json.loads(cli("dead-letters", "run", "--json").out) == []


def test_the_list_has_kind_and_reason_of_each(cli: Cli, run: RunPaths) -> None:
    letters = json.loads(cli("dead-letters", "run", "--json").out)
    assert [(one["kind"], one["role"], one["message"]) for one in letters] == [
        ("quarantined", "reward", "score_request/1"), ("no consumer", "rollout", "generation_request/1")]
    assert letters[0]["quarantine"] == NAME and letters[0]["groups"] == ["g000003"]
    assert [victim["incarnation"] for victim in letters[0]["killed"]] == ["1-a", "2-b"]
    first, second = cli("dead-letters", "run").out.splitlines()
    assert " quarantined: rewards (role reward, 1 groups): rewards killed 2 actors of role reward " in first
    assert second.endswith(" no consumer: 32 prompts of step 7 (role rollout): waited in vain")


def test_a_message_of_the_quarantine_is_printed_whole(cli: Cli, run: RunPaths) -> None:
    shown = json.loads(cli("dead-letters", "run", "--show", NAME, "--json").out)
    assert shown["schema"][0] == "score_request" and shown["problem"] is None
    [group] = shown["content"]["groups"]
    assert np.array_equal(group["tokens"], make_group(3).tokens) and group["task"] == {"answer": 3}


def test_for_a_person_arrays_are_one_line(cli: Cli, run: RunPaths) -> None:
    out = cli("dead-letters", "run", "--show", NAME).out
    assert "rewards killed 2 actors of role reward (reward-0: killed by SIGKILL; reward-0: killed by SIGKILL)" in out
    assert '"lengths": "int32 [3]: 2, 3, 1"' in out


def test_a_name_that_is_not_there_says_what_is(cli: Cli, run: RunPaths) -> None:
    assert cli("dead-letters", "run", "--show", "nothing").error == (
        f"nothing named nothing is in quarantine; there is: {NAME}")


def test_a_payload_that_was_changed_is_one_line(cli: Cli, run: RunPaths) -> None:
    path = quarantine_of(run) / f"{NAME}.msgpack"
    path.write_bytes(path.read_bytes()[:-5])
    assert "can not be read as a quarantined message" in cli("dead-letters", "run", "--show", NAME).error
