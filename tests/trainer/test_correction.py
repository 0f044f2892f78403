"""What engine and trainer compute differently: measured as the reference measures it, and weighed against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cosmos_actor.actors.errors import UserError
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.trainer.batch import batch_from_groups
from cosmos_actor.trainer.correction import correction, correction_metrics, effective_share, mismatch, newest_mismatch
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer import reference
from tests.trainer.make import make_engine, make_settings, sample_groups
from tests.trainer.test_objectives import columns, ragged_mask

RULES = ("truncate", "mask", "two_sided")


@pytest.fixture(scope="module")
def groups():
    """Sampled by the initial weights, and said to be sampled by an engine that is 0.3 nats off."""
    sampled = sample_groups(make_engine(PolicyTrainer(make_settings())), new=8)
    chance = np.random.default_rng(5)
    return [replace(group, logprobs=(group.logprobs + chance.normal(0, 0.3, group.token_count)).astype(np.float32))
            for group in sampled]


def test_the_distances_equal_the_reference() -> None:
    x, o, _, _ = columns()
    o[0, 0] = x[0, 0] - 30.0  # past every clamp
    ours, mask = mismatch(x, o, ragged_mask()), ragged_mask()
    expected = reference.distances(x, o, mask)
    assert set(ours) == {f"mismatch/{name}" for name in expected}
    for name, value in expected.items():
        assert ours[f"mismatch/{name}"] == pytest.approx(value, rel=1e-12), name


def test_equal_policies_are_no_distance_apart_and_nothing_is_cut() -> None:
    x, mask = columns()[0], ragged_mask()
    assert mismatch(x, x, mask) == {
        "mismatch/k1": 0.0, "mismatch/k3": 0.0, "mismatch/ess": 1.0, "mismatch/ess_sequence": 1.0,
        "mismatch/chi2": 0.0, "mismatch/chi2_sequence": 0.0, "mismatch/max": 0.0}
    for rule in RULES:
        made = correction(x, x, mask, level="sequence", rule=rule, cap=2.0, floor=0.5)
        assert (made.weights == 1.0).all() and not made.cut.any()
    assert mismatch(x, x, np.zeros_like(mask)) == {}
    assert effective_share(np.array([0.0, 3.0, 0.0, 0.0])) == 0.25


def test_what_goes_on_from_older_weights_is_told_apart_from_what_only_the_newest_sampled() -> None:
    x, mask = np.zeros((4, 5)), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    versions = np.array([[1, 1, 2, 2, 2], [2, 2, 2, 2, 9], [-1, 2, 2, 2, 2], [9, 9, 9, 9, 9]])
    o = np.zeros((4, 5))
    o[0, :2], o[0, 4], o[2, 4], o[1, 4] = 7.0, 3.0, 0.5, 99.0
    assert newest_mismatch(x, o, mask, versions) == {"mismatch/newest_max": 3.0, "mismatch/newest_whole_max": 0.5}
    assert newest_mismatch(x[:1], o[:1], mask[:1], versions[:1]) == {"mismatch/newest_max": 3.0}
    assert newest_mismatch(x, o, np.zeros_like(mask), versions) == {}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", RULES)
def test_weights_equal_the_reference(level: str, rule: str) -> None:
    x, o, _, _ = columns(4)
    mask, cap, floor = ragged_mask(), 1.3, 0.8
    made = correction(x, o, mask, level=level, rule=rule, cap=cap, floor=floor)
    ratios = reference.ratios(x, o, mask, level)
    expected = np.array([[1.0 if np.isnan(ratio) else reference.corrected(ratio, rule, cap, floor) for ratio in row]
                         for row in ratios])
    np.testing.assert_allclose(made.weights, expected, rtol=1e-12)
    assert (made.cut == (~np.isnan(ratios) & ~np.isclose(expected, ratios))).all() and made.cut.any()
    metrics = correction_metrics(made, mask)
    assert metrics["correction/cut_tokens"] == made.cut.sum()
    assert metrics["correction/cut"] == made.cut.sum() / mask.sum()
    assert metrics["correction/weight"] == pytest.approx(expected[mask > 0].mean(), rel=1e-12)


def test_unknown_names_are_refused() -> None:
    x, mask = columns()[0], ragged_mask()
    with pytest.raises(ValueError, match="word"):
        correction(x, x, mask, level="word", rule="mask", cap=2.0)
    with pytest.raises(ValueError, match="round"):
        correction(x, x, mask, level="token", rule="round", cap=2.0)


@pytest.mark.parametrize(("flags", "line"), [
    (["level=token"], r"needs policy\.grpo\.old_logprobs = \"recomputed\""),
    (["cap=0.5"], r"floor = 0\.5 is not under policy\.grpo\.correction\.cap = 0\.5"),
    (["rule=clip"], r"policy\.grpo\.correction\.rule"),
])
def test_settings_that_can_not_be_are_refused_by_name(flags: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        resolve("grpo-arithmetic", [f"policy.grpo.correction.{flag}" for flag in flags])


def corrected_settings(level: str, rule: str, **fields):
    how = {"level": level, "rule": rule, "cap": 1.3, "floor": 0.8}
    return make_settings(grpo={"old_logprobs": "recomputed", "correction": how}, **fields)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", RULES)
def test_the_policy_loss_is_weighed_and_the_gradient_is_that_of_weighed_advantages(groups, level, rule) -> None:
    """At a ratio of 1 the loss is -A·w, so the reference needs nothing of the trainer's but its log-probs."""
    trainer = PolicyTrainer(corrected_settings(level, rule))
    batch, rows = trainer.policy_batch(groups)
    x = trainer.score(batch).astype(np.float64)
    ratios = reference.ratios(x, batch.engine_logprobs.astype(np.float64), batch.mask, level)
    losses = np.array([[0.0 if np.isnan(ratio) else -a * reference.corrected(ratio, rule, 1.3, 0.8)
                        for ratio, a in zip(ratio_row, a_row, strict=True)]
                       for ratio_row, a_row in zip(ratios, batch.advantages, strict=True)])
    expected = reference.aggregate(losses, batch.mask, "token-mean", 1)
    metrics = trainer.policy_step(batch, rows)
    assert metrics["loss/policy"] == pytest.approx(expected, abs=1e-6)
    assert metrics["ratio/distance_max"] < 1e-5  # of the trainer against itself, whatever the engine said
    assert 0 < metrics["correction/cut"] < 1
    assert metrics["mismatch/k3"] == pytest.approx(reference.distances(
        x, batch.engine_logprobs.astype(np.float64), batch.mask)["k3"], rel=1e-6)


@pytest.mark.parametrize("old", ["behaviour", "recomputed"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_micro_batches_change_no_distance(groups, old: str, mini_batches: int) -> None:
    how = {"old_logprobs": old, "mini_batches": mini_batches,
           "correction": {"level": "sequence" if old == "recomputed" else "none"}}
    whole, split = (PolicyTrainer(make_settings(micro_batch_tokens=limit, grpo=how)).grpo_step(groups)
                    for limit in (1 << 20, 40))
    names = {name for name in whole if name.startswith(("mismatch/", "correction/"))}
    assert len(names) == (12 if old == "recomputed" else 9)
    for name in names:
        assert split[name] == pytest.approx(whole[name], abs=1e-6, rel=1e-5), name


def test_the_distance_is_measured_before_the_update_and_over_all_that_is_learned(groups) -> None:
    """Recomputed: over every token. Else: over those that have a gradient; here all have."""
    untied = [replace(group, rewards=np.array([0, 1, 5], np.float32)) for group in groups]
    results = [PolicyTrainer(make_settings(grpo={"old_logprobs": old})).grpo_step(untied)
               for old in ("behaviour", "recomputed")]
    for name in (name for name in results[0] if name.startswith("mismatch/")):
        assert results[1][name] == pytest.approx(results[0][name], abs=1e-6), name
    assert batch_from_groups(untied).token_count == results[0]["tokens"]


def mismatch_over_versions(settings, versions: int, *, deliver: bool = True) -> list[dict[str, float]]:
    """The metrics of `versions` updates, each on what an engine sampled that was given the version; or was not."""
    trainer = PolicyTrainer(settings)
    engine, lines = make_engine(trainer), []
    for version in range(1, versions + 1):
        lines.append(trainer.grpo_step(sample_groups(engine, seed=version)))
        if deliver:
            weights = trainer.weights()
            engine.load_weights(weights, version, weights_digest(weights))
    return lines


@pytest.mark.parametrize("old", ["behaviour", "recomputed"])
@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_the_distance_stays_flat_over_versions_that_were_delivered(old: str, lr: float) -> None:
    lines = mismatch_over_versions(make_settings(lr=lr, grpo={"old_logprobs": old}), 6)
    assert max(line["mismatch/max"] for line in lines) < 1e-5
    assert max(line["mismatch/k3"] for line in lines) < 1e-9
    assert min(line["mismatch/ess_sequence"] for line in lines) > 1 - 1e-9


def test_a_version_that_never_comes_is_seen_as_a_distance_that_grows() -> None:
    distances = [line["mismatch/k3"] for line in mismatch_over_versions(make_settings(lr=1e-2), 4, deliver=False)]
    assert distances[0] < 1e-9 and distances[1] > 1e-4 and distances[3] > distances[1]
