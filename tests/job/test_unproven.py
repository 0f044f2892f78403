"""Groups of weights that nobody proved: the ledger drops them with the reason, others are trained in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.job.intake import ShortSample
from cosmos_actor.job.weights import UnprovenWeights, Weights
from cosmos_actor.roles.messages import Generation
from tests.job.small_job import SmallJob, small_job

ONE = 3
"""Trajectories of a group, which is a part here."""


def ask(small: SmallJob, unproven: set[str]) -> None:
    """The samples of step 1; groups with these names come from weights of another digest, the others are right."""
    job = small.job
    job.weights._digests["0.0"] = "right"

    def vouch(made: Generation) -> None:
        names = {group.group_id for group in made.groups}
        assert made.weights == {}  # the played rollout proves nothing
        digest = "wrong" if names & unproven else "right"
        steps = {f"0.{group.version_min}": digest for group in made.groups}
        Weights.vouch(job.weights, Generation(made.groups, made.seconds, made.tokens, steps))

    job.weights.vouch = vouch
    job.weights.published_step = 0
    job.expect(1, job.replay_buffer.put(job.reward.score(job.rollout.generate(job.data.tasks(1), 1)), 1))


def events(small: SmallJob, name: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(small.job.paths.events) if event["event"] == name]


def test_they_are_dropped_with_the_reason_and_other_prompts_take_their_place(tmp_path: Path) -> None:
    with small_job(tmp_path, "rollout.chunk_prompts=1") as small:
        small.job.restore("the controller started")
        ask(small, {"g000001-0"})
        assert [group.group_id for group in small.job.replay_buffer.sample(1)] == ["g000001-1", "g000001-r0"]
        balance = small.job.ledger.balance()
        assert balance["dropped"] == {"unproven weights": ONE} and balance["balanced"]
        [told] = events(small, "unproven_weights")
        assert told["groups"] == ["g000001-0"]
        assert told["reason"] == "made with weights 0.0 of digest wrong, published was right"


def test_an_engine_that_never_proves_its_weights_ends_the_job_and_says_why(tmp_path: Path) -> None:
    with small_job(tmp_path, "rollout.chunk_prompts=1") as small:
        small.job.restore("the controller started")
        ask(small, {f"g000001-{name}" for name in ("0", "1", "r0", "r1")})
        with pytest.raises(ShortSample, match=r"lost: .*unproven weights"):
            small.job.wait_for(1)
        assert small.job.ledger.balance()["dropped"]["unproven weights"] >= 2 * ONE


def test_an_evaluation_of_unproven_weights_only_says_so(tmp_path: Path) -> None:
    with small_job(tmp_path, "data.eval_problems=1") as small:
        small.job.restore("the controller started")

        def vouch(made: Generation) -> None:
            raise UnprovenWeights("made with weights 0.0, and nobody says of which digest")

        small.job.weights.vouch = vouch
        small.job.weights.published_step = 0
        with pytest.raises(UnprovenWeights, match="nobody says of which digest"):
            small.job.evaluate()
        balance = small.job.ledger.balance()
        assert set(balance["dropped"]) == {"unproven weights"} and balance["balanced"]
