"""GRPO (Shao et al. 2024): sample groups, judge them, train on how each compares with its own group.

A few supervised steps may come first (`policy.sft_steps`), for a model that starts from nothing.
Left out: curricula, dynamic sampling, early stopping; one update of the policy a step.
"""

from __future__ import annotations

from cosmos_actor.job.job import Job


def run(job: Job) -> None:
    """Walk through the steps that are still to do, the samples of up to `run.max_staleness` later ones under way."""
    data, rollout, reward, replay_buffer = job.data, job.rollout, job.reward, job.replay_buffer
    reference, policy, weights = job.reference, job.policy, job.weights

    for step in job.steps(job.settings.policy.sft_steps):
        job.log("sft", policy.sft(data.demonstrations(step), step).resolve())

    rollout.wait_for_actors()
    weights.publish_reference()
    weights.publish()
    weights.wait_until_held()
    if job.evaluation_due(job.step):
        job.evaluate()

    for step in job.steps(job.last_step):
        for ahead in job.dispatchable(step):
            samples = reward.score(rollout.generate(data.tasks(ahead), ahead))
            job.expect(ahead, replay_buffer.put(samples, ahead))
        job.wait_for(step)
        scored = reference.score(replay_buffer.sample(step))
        job.log("grpo", policy.update(scored, step).resolve())
        weights.publish()
        if job.evaluation_due(step):
            job.evaluate()
