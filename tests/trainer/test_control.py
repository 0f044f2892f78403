"""PPO for control: the first ratio is one, an update is a function of its inputs, and a resumed trainer is no other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cosmos_actor.trainer.batch import BatchError
from cosmos_actor.trainer.checkpoint import CheckpointError
from cosmos_actor.trainer.control import ControlTrainer
from cosmos_actor.trainer.estimators import gae, vtrace
from cosmos_actor.trainer.objectives import value_loss
from cosmos_actor.trainer.policy import NotFinite
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make_control import (
    BOX_ACTION,
    DISCRETE_ACTION,
    IMAGES,
    VECTORS,
    make_batch,
    make_engine,
    make_trainer,
    seen,
    settings,
)

NORMALISED = {"normalise_observations": True, "normalise_rewards": True}
CNN = {"kind": "cnn", "hidden": (32,), "activation": "relu", "shared": True}
CASES = {
    "discrete": (settings(), DISCRETE_ACTION, VECTORS),
    "box": (settings({"shared": True}, **NORMALISED), BOX_ACTION, VECTORS),
    "images": (settings(CNN, **NORMALISED), DISCRETE_ACTION, IMAGES),
    "vtrace": (settings({"activation": "relu"}, estimator="vtrace", **NORMALISED), BOX_ACTION, VECTORS),
    "critic first": (settings({"shared": True}, critic_first=2), BOX_ACTION, VECTORS),
}


def trained(trainer: ControlTrainer, updates: int, specs=VECTORS) -> list[dict[str, float]]:
    """Updates on what an engine with the newest weights did."""
    return [trainer.update(make_batch(make_engine(trainer), specs, seed=trainer.updates["ppo"]))
            for _ in range(updates)]


def computed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}


def test_a_snapshot_is_the_weights_and_moments_whatever_the_next_update_does() -> None:
    chosen, action, specs = CASES["box"]
    trainer = make_trainer(chosen, action, observations=specs)
    trained(trainer, 1)
    before, snapshot = weights_digest(trainer.weights()), trainer.snapshot()
    trained(trainer, 1)
    assert weights_digest(snapshot.arrays()) == before != weights_digest(trainer.weights())


@pytest.mark.parametrize("case", CASES)
def test_the_first_ratio_is_one_after_any_number_of_updates(case: str) -> None:
    chosen, action, specs = CASES[case]
    for metrics in trained(make_trainer(chosen, action, observations=specs), 3, specs):
        assert metrics["ratio/first"] < 1e-5
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["kl/old"] >= 0 and 0 <= metrics["clip/fraction"] <= 1


@pytest.mark.parametrize("case", CASES)
def test_equal_inputs_give_bit_equal_weights_and_another_seed_does_not(case: str) -> None:
    chosen, action, specs = CASES[case]
    one, two, other = (make_trainer(chosen, action, seed=seed, observations=specs) for seed in (1, 1, 2))
    found = [[computed(m) for m in trained(trainer, 2, specs)] for trainer in (one, two, other)]
    assert found[0] == found[1] != found[2]
    assert weights_digest(one.weights()) == weights_digest(two.weights()) != weights_digest(other.weights())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("before", [0, 2])
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path, case: str, before: int) -> None:
    chosen, action, specs = CASES[case]
    straight = make_trainer(chosen, action, observations=specs)
    trained(straight, before, specs)
    straight.save(tmp_path / "policy")
    expected = [computed(m) for m in trained(straight, 2, specs)]
    resumed = make_trainer(chosen, action, observations=specs)
    trained(resumed, 1, specs)
    resumed.load(tmp_path / "policy")
    assert [computed(m) for m in trained(resumed, 2, specs)] == expected
    assert weights_digest(resumed.weights()) == weights_digest(straight.weights())
    assert resumed.updates == straight.updates


def test_a_reset_trainer_is_a_new_one() -> None:
    trainer = make_trainer(settings(**NORMALISED))
    first = [computed(m) for m in trained(trainer, 2)]
    trainer.reset()
    assert [computed(m) for m in trained(trainer, 2)] == first


@pytest.mark.parametrize("other", [
    make_trainer(settings({"hidden": (64, 32)})), make_trainer(settings(normalise_observations=True)),
    make_trainer(action=BOX_ACTION), make_trainer(observations={"position": VECTORS["position"]}),
])
def test_the_checkpoint_of_another_network_is_refused_in_one_line(tmp_path, other: ControlTrainer) -> None:
    make_trainer().save(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=r"control\.network = mlp 64-64 tanh separate") as error:
        other.load(tmp_path / "policy")
    assert "\n" not in str(error.value)


def test_published_weights_are_copies() -> None:
    trainer = make_trainer(settings(**NORMALISED))
    weights = trainer.weights()
    before = weights_digest(weights)
    trained(trainer, 1)
    assert weights_digest(weights) == before != weights_digest(trainer.weights())


def test_moments_join_after_the_steps_and_travel_with_the_weights() -> None:
    trainer = make_trainer(settings(learning_rate=0.0, **NORMALISED))
    batch = make_batch(make_engine(trainer))
    assert trainer.weights()["seen_moments.mean"].tolist() == [0.0] * 4
    assert trainer.update(batch)["ratio/first"] < 1e-6
    rows = trainer.model.layout(batch["observations"]).vectors
    np.testing.assert_allclose(trainer.weights()["seen_moments.mean"], rows.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(trainer.weights()["seen_moments.variance"], rows.var(axis=0), rtol=1e-4)


def test_how_observations_were_split_over_updates_leaves_the_moments() -> None:
    from cosmos_actor.trainer.running_moments import RunningMoments

    rows = np.random.default_rng(0).normal(5.0, 3.0, (1000, 4))
    whole, parts = RunningMoments(4), RunningMoments(4)
    whole.include(rows)
    for part in np.split(rows, [1, 7, 400, 999]):
        parts.include(part)
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(parts.variance, whole.variance, rtol=1e-12)
    normal = whole(torch.from_numpy(rows.astype(np.float32)))
    assert abs(float(normal.mean())) < 1e-5 and abs(float(normal.std()) - 1) < 1e-3
    assert float(whole(torch.full((1, 4), 1e9)).max()) == 10.0


def test_metrics_of_one_whole_step_are_those_of_the_definitions() -> None:
    """One pass over one mini-batch: the loss is known before anything has changed."""
    trainer = make_trainer(settings(epochs=1, mini_batches=1))
    batch = make_batch(make_engine(trainer))
    advantages, returns = gae(batch["rewards"], batch["values"], batch["bootstrap"], batch["boundary"], 0.99, 0.95)
    metrics = trainer.update(batch)
    assert metrics["loss/policy"] == pytest.approx(0.0, abs=1e-6)  # -mean of advantages with mean 0
    assert metrics["loss/value"] == pytest.approx(0.5 * np.mean((batch["values"] - returns) ** 2), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(math.log(3), abs=0.01)  # a new policy likes all actions alike
    assert metrics["loss/total"] == pytest.approx(
        metrics["loss/policy"] + 0.5 * metrics["loss/value"] - 0.01 * metrics["entropy"], rel=1e-5)
    assert metrics["kl/old"] == pytest.approx(0.0, abs=1e-6) and metrics["clip/fraction"] == 0.0
    assert metrics["explained_variance"] == pytest.approx(1 - np.var(advantages) / np.var(returns), abs=1e-5)


def test_vtrace_of_the_present_policy_is_gae_at_lambda_one() -> None:
    plain = {"epochs": 1, "gae_lambda": 1.0}
    one, two = make_trainer(settings(**plain)), make_trainer(settings(estimator="vtrace", **plain))
    batch = make_batch(make_engine(one))
    assert one.update(batch)["loss/total"] == pytest.approx(two.update(batch)["loss/total"], rel=1e-5)


def test_vtrace_takes_the_present_policys_values_for_an_older_ones_data() -> None:
    trainer = make_trainer(settings(estimator="vtrace", epochs=1, mini_batches=1, clip_value=False))
    old = make_batch(make_engine(trainer))
    trained(trainer, 5)
    newer = make_engine(trainer, 1).values(old["observations"])
    shown = trainer.model.layout(old["observations"]).to(torch.device("cpu"))
    with torch.no_grad():
        policy, _ = trainer.model.distribution(shown)
        logprobs = policy.log_prob(torch.from_numpy(old["actions"])).numpy()
    expected = vtrace(logprobs - old["logprobs"], old["rewards"], newer, old["bootstrap"], old["boundary"], 0.99, 0.95)
    assert trainer.update(old)["loss/value"] == pytest.approx(0.5 * np.mean((newer - expected.returns) ** 2), rel=1e-4)


@pytest.mark.parametrize("action", [DISCRETE_ACTION, BOX_ACTION], ids=["discrete", "box"])
def test_it_learns_what_is_rewarded(action) -> None:
    trainer = make_trainer(settings(learning_rate=5e-3, anneal=False), action)
    trained(trainer, 80)  # at 40 it has half of that margin, and processors round differently
    actions, _, _ = make_engine(trainer).act(seen(VECTORS, 200, 77), None)
    assert np.mean(actions == 0) > 0.95 if action is DISCRETE_ACTION else np.mean(np.abs(actions - 0.5)) < 0.3


def test_the_step_size_falls_to_zero_over_the_run_or_stays() -> None:
    falls, stays = make_trainer(total=4), make_trainer(settings(anneal=False), total=4)
    assert [m["learning_rate"] for m in trained(falls, 5)] == pytest.approx([2.5e-4, 1.875e-4, 1.25e-4, 6.25e-5, 0.0])
    assert [m["learning_rate"] for m in trained(stays, 2)] == [2.5e-4, 2.5e-4]


def test_no_further_pass_far_from_the_old_policy() -> None:
    assert trained(make_trainer(settings(learning_rate=0.1, target_kl=1e-4)), 1)[0]["epochs"] == 1
    assert trained(make_trainer(settings(learning_rate=0.0, target_kl=1e-4)), 1)[0]["epochs"] == 4


def test_rewards_are_divided_by_the_std_of_what_was_earned() -> None:
    one, two = (make_trainer(settings(normalise_rewards=True, learning_rate=0.0)) for _ in range(2))
    batch = make_batch(make_engine(one))
    scaled = {**batch, "rewards": batch["rewards"] * 1000}
    assert one.update(batch)["loss/value"] == pytest.approx(two.update(scaled)["loss/value"], rel=1e-2)


@pytest.mark.parametrize(("change", "text"), [
    ({"values": np.zeros(3, np.float32)}, "values has 3 rows"),
    ({"boundary": np.zeros(64, bool)}, "no boundary"),
])
def test_columns_that_do_not_fit_are_refused(change, text: str) -> None:
    trainer = make_trainer()
    with pytest.raises(BatchError, match=text):
        trainer.update({**make_batch(make_engine(trainer)), **change})


def test_too_few_steps_name_the_setting() -> None:
    trainer = make_trainer(settings(mini_batches=32))
    with pytest.raises(BatchError, match=r"control\.ppo\.mini_batches"):
        trainer.update(make_batch(make_engine(trainer), steps=16))


def test_a_gradient_that_is_no_number_changes_nothing() -> None:
    trainer = make_trainer()
    batch = make_batch(make_engine(trainer))
    before = weights_digest(trainer.weights())
    with pytest.raises(NotFinite, match=r"control\.ppo\.learning_rate"):
        trainer.update({**batch, "rewards": np.full(64, np.inf, np.float32)})
    assert weights_digest(trainer.weights()) == before


def test_a_clipped_value_gains_nothing_by_moving_further() -> None:
    V, old, R = torch.tensor([0.1, 0.9, -0.9]), torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    assert value_loss(V, old, R).tolist() == pytest.approx([0.405, 0.005, 1.805])
    assert value_loss(V, old, R, clip=0.2).tolist() == pytest.approx([0.405, 0.32, 1.805])
