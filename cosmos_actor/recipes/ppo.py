"""PPO (Schulman et al. 2017) on episodes of simulators that attach from environments of their own.

Each step: fragments from the simulators under the newest weights, their rewards, an update, new weights. A policy may
be shown demonstrations first (`policy.sft_steps`). Reference and critic are roles of their own where the settings ask
for them (`control.ppo.kl_coefficient`, `critic.count`); otherwise their lines do nothing.
Left out: self-play, curricula, frame stacking; one update of the policy a step.
"""

from __future__ import annotations

from cosmos_actor.job.job import Job


def run(job: Job) -> None:
    """Walk through the steps that are still to do, the fragments of up to `run.max_staleness` later ones under way."""
    data, rollout, reward, replay_buffer = job.data, job.rollout, job.reward, job.replay_buffer
    reference, critic, policy, simulators, weights = job.reference, job.critic, job.policy, job.simulators, job.weights

    rollout.wait_for_actors()
    body = simulators.describe()
    policy.prepare(body)
    critic.prepare(body)

    for step in job.steps(job.settings.policy.sft_steps):
        job.log("cloning", policy.clone(data.shown(step, body), step).resolve())

    weights.publish_reference()
    weights.publish()
    weights.wait_until_held()
    if job.evaluation_due(job.step):
        simulators.evaluate()

    for step in job.steps(job.last_step):
        for ahead in job.dispatchable(step):
            fragments = reward.score(simulators.collect(data.tasks(ahead, samples=1), ahead))
            job.expect(ahead, replay_buffer.put(fragments, ahead))
        job.wait_for(step)
        batch = critic.judge(reference.score(replay_buffer.sample(step))).resolve()
        acts, judges = policy.update(batch, step), critic.update(batch, step)
        job.log("ppo", {**simulators.episodes(batch, step), **acts.resolve(), **judges.resolve()})
        weights.publish()
        if job.evaluation_due(step):
            simulators.evaluate()
