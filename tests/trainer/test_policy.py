"""The policy trainer: its loss against a float64 reference, and what must not change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_actor.trainer import model_weights
from cosmos_actor.trainer.batch import BatchError, batch_from_examples
from cosmos_actor.trainer.forward import score_tokens
from cosmos_actor.trainer.model_weights import named_tensors
from cosmos_actor.trainer.policy import NotFinite, PolicyTrainer
from cosmos_actor.trainer.scorer import Scorer
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer import reference
from tests.trainer.make import EXAMPLES, MODEL, make_engine, make_settings, sample_groups


@pytest.fixture(scope="module")
def groups():
    """Sampled by the initial weights."""
    return sample_groups(make_engine(PolicyTrainer(make_settings())))


def float64_logprobs(trainer: PolicyTrainer, group, temperature: float) -> list[list[float]]:
    """Each sample's token log-probs, one sequence at a time, in float64."""
    model = PolicyTrainer(trainer.settings).model.double()
    model.load_state_dict(trainer.model.state_dict())
    result = []
    for part in group.slices():
        sequence = torch.tensor([[*group.prompt.tolist(), *group.tokens[part].tolist()]])
        with torch.no_grad():
            logits = model(input_ids=sequence).logits[0].numpy() / temperature
        shifted = logits - logits.max(axis=1, keepdims=True)
        table = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        start = len(group.prompt)
        result.append([table[at - 1, sequence[0, at]] for at in range(start, sequence.shape[1])])
    return result


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_grpo_loss_equals_the_reference(groups, aggregation: str) -> None:
    settings = make_settings(grpo={"kl_coefficient": 0.1, "aggregation": aggregation})
    trainer = PolicyTrainer(settings)
    moved = [_moved(group, number) for number, group in enumerate(groups)]
    rows, mask = _reference_losses(trainer, moved)
    expected = reference.aggregate(rows, mask, aggregation, 1)
    metrics = trainer.grpo_step(moved)
    assert metrics["loss/total"] == pytest.approx(expected, abs=1e-6)


def test_a_gradient_that_is_no_number_changes_no_weight(groups) -> None:
    trainer = PolicyTrainer(make_settings())
    before = weights_digest(trainer.weights())
    spoiled = [replace(group, rewards=np.full_like(group.rewards, np.nan)) for group in groups]
    with pytest.raises(NotFinite, match=r"update 1 \(policy\) is nan.*policy\.optimizer\.learning_rate"):
        trainer.grpo_step(spoiled)
    assert weights_digest(trainer.weights()) == before and trainer.updates["policy"] == 0


def _moved(group, number: int):
    """The group as if an older policy had sampled it, with a reference that differs."""
    chance = np.random.default_rng(number)
    noise = chance.normal(0, 0.3, (2, group.token_count)).astype(np.float32)
    return replace(group, logprobs=group.logprobs + noise[0], reference_logprobs=group.logprobs + noise[1])


def _reference_losses(trainer: PolicyTrainer, groups) -> tuple[np.ndarray, np.ndarray]:
    longest = max(int(group.lengths.max()) for group in groups)
    losses, masks = [], []
    for group in groups:
        advantages = _reference_advantages(group.rewards.tolist())
        for x, part, a in zip(float64_logprobs(trainer, group, 1.0), group.slices(), advantages, strict=True):
            o, r = group.logprobs[part].tolist(), group.reference_logprobs[part].tolist()
            values = [
                reference.clip_loss(xi, oi, a, 0.2, 0.2, 0.0) + 0.1 * reference.kl(xi, ri, "k3")
                for xi, oi, ri in zip(x, o, r, strict=True)
            ]
            losses.append(values + [0.0] * (longest - len(values)))
            masks.append([1] * len(values) + [0] * (longest - len(values)))
    return np.array(losses), np.array(masks)


def _reference_advantages(rewards: list[float]) -> list[float]:
    return [0.0] * len(rewards) if len(set(rewards)) == 1 else reference.advantages(rewards, 1e-6, True)


def test_the_engine_and_the_trainer_agree_on_logprobs(groups) -> None:
    scored = PolicyTrainer(make_settings()).logprobs(groups)
    for ours, group in zip(scored, groups, strict=True):
        np.testing.assert_allclose(ours, group.logprobs, atol=1e-5)


def test_logprobs_are_those_of_float64_at_another_temperature() -> None:
    trainer = PolicyTrainer(make_settings(), temperature=0.7)
    sampled = sample_groups(make_engine(trainer), temperature=0.7)
    for ours, group in zip(trainer.logprobs(sampled), sampled, strict=True):
        expected = np.concatenate(float64_logprobs(trainer, group, 0.7))
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        np.testing.assert_allclose(group.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 100])
def test_micro_batches_change_neither_loss_nor_weights(groups, micro_batch_tokens: int) -> None:
    results = []
    for limit in (1 << 20, micro_batch_tokens):
        trainer = PolicyTrainer(make_settings(micro_batch_tokens=limit))
        metrics = [trainer.sft_step(batch_from_examples(EXAMPLES)), trainer.grpo_step(groups)]
        results.append((metrics, trainer.weights()))
    for whole, split in zip(results[0][0], results[1][0], strict=True):
        for name in set(whole) - {"seconds/update"}:
            assert split[name] == pytest.approx(whole[name], abs=1e-6, rel=1e-5), name
    for name, tensor in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], tensor, atol=1e-5)


def test_the_order_of_groups_does_not_change_the_loss(groups) -> None:
    forward, backward = (PolicyTrainer(make_settings()).grpo_step(order) for order in (groups, groups[::-1]))
    assert backward["loss/total"] == pytest.approx(forward["loss/total"], abs=1e-6)
    assert backward["grad_norm"] == pytest.approx(forward["grad_norm"], rel=1e-4)


def test_with_a_learning_rate_of_zero_nothing_moves(groups) -> None:
    trainer = PolicyTrainer(make_settings(lr=0.0, grpo={"old_logprobs": "recomputed", "kl_coefficient": 0.1}))
    before = weights_digest(trainer.weights())
    scorer = Scorer(trainer.settings)
    scorer.load_weights(trainer.weights(), 0, before)
    pairs = zip(groups, scorer.logprobs(groups), strict=True)
    scored = [group.with_field("reference_logprobs", column, "reference-0") for group, column in pairs]
    for _ in range(3):
        metrics = trainer.grpo_step(scored)
        assert metrics["ratio/distance_max"] == 0.0
        assert metrics["kl/reference"] == 0.0
        assert metrics["clip/fraction"] == 0.0
    assert weights_digest(trainer.weights()) == before


def test_the_behaviour_ratio_is_one_up_to_rounding(groups) -> None:
    metrics = PolicyTrainer(make_settings()).grpo_step(groups)
    assert metrics["ratio/distance_max"] < 1e-5
    assert metrics["logprob/engine_distance_max"] < 1e-5


def test_tied_groups_change_nothing_but_the_counts(groups) -> None:
    tied = [replace(groups[0], group_id="g9", rewards=np.ones(groups[0].samples, np.float32)), *groups]
    results = []
    for coefficient in (0.0, 1e-30):  # the second computes the tied rows too
        trainer = PolicyTrainer(make_settings(grpo={"kl_coefficient": coefficient}))
        scored = [replace(group, reference_logprobs=group.logprobs) for group in tied]
        results.append((trainer.grpo_step(scored), trainer.weights()))
    assert results[0][0]["loss/total"] == pytest.approx(results[1][0]["loss/total"], abs=1e-6)
    assert results[0][0]["tokens"] < results[1][0]["tokens"]
    for name, tensor in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], tensor, atol=1e-5)


def test_a_batch_of_ties_is_an_update_without_gradient(groups) -> None:
    tied = [replace(group, rewards=np.ones(group.samples, np.float32)) for group in groups]
    trainer = PolicyTrainer(make_settings())
    before = weights_digest(trainer.weights())
    assert trainer.grpo_step(tied)["grad_norm"] == 0.0
    assert weights_digest(trainer.weights()) == before


def test_mini_batches_are_updates(groups) -> None:
    trainer = PolicyTrainer(make_settings(grpo={"mini_batches": 2, "old_logprobs": "recomputed"}))
    metrics = trainer.grpo_step(groups)
    assert trainer.updates == {"sft": 0, "policy": 2}
    assert metrics["ratio/distance_max"] > 1e-4


def test_the_learning_rate_warms_up_by_kind(groups) -> None:
    trainer = PolicyTrainer(make_settings(lr=0.01))
    assert trainer.sft_step(batch_from_examples(EXAMPLES))["learning_rate"] == pytest.approx(0.01)
    rates = [trainer.grpo_step(groups)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([0.005, 0.01, 0.01])


def test_supervised_steps_teach_the_answer_and_not_the_prompt() -> None:
    trainer = PolicyTrainer(make_settings(lr=1e-2))
    batch = batch_from_examples(EXAMPLES)
    losses = [trainer.sft_step(batch)["loss/total"] for _ in range(40)]
    assert losses[0] > 3.0 and losses[-1] < 0.05
    with torch.no_grad():
        logprobs = score_tokens(trainer.model, batch, temperature=1.0).logprobs.numpy()
    assert (logprobs * batch.mask).min() > -0.2


def test_a_reference_is_asked_for_where_it_is_needed(groups) -> None:
    with pytest.raises(BatchError, match="kl_coefficient"):
        PolicyTrainer(make_settings(grpo={"kl_coefficient": 0.1})).grpo_step(groups)


def test_weights_have_one_name_for_a_tied_head_and_are_a_copy() -> None:
    trainer = PolicyTrainer(make_settings())
    weights = trainer.weights()
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights
    before = weights_digest(weights)
    trainer.sft_step(batch_from_examples(EXAMPLES))
    assert weights_digest(weights) == before
    assert weights_digest(trainer.weights()) != before


@pytest.mark.parametrize(("name", "stored", "held"), [("bfloat16", np.uint16, torch.bfloat16),
                                                      ("float16", np.float16, torch.float16)])
def test_a_published_dtype_is_what_the_engine_holds(name: str, stored: Any, held: torch.dtype) -> None:
    trainer = PolicyTrainer(make_settings(publish_dtype=name))
    engine = make_engine(trainer)
    assert engine.held.digest == weights_digest(trainer.weights())
    assert {tensor.dtype for tensor in trainer.weights().values()} == {np.dtype(stored)}
    assert engine.generate.__self__.model.dtype == held
    metrics = trainer.grpo_step(sample_groups(engine))
    assert 0.0 < metrics["mismatch/k3"] < 1e-3


def test_of_a_small_step_float16_publishes_most_and_bfloat16_less_than_it_rounds() -> None:
    """How far the published step is off the trainer's, as a share of the trainer's."""
    off = {}
    for name in ("bfloat16", "float16"):
        trainer = PolicyTrainer(make_settings(publish_dtype=name, lr=1e-5))
        before, own = _published(trainer), [one.detach().clone() for one in named_tensors(trainer.model).values()]
        for version in range(2):
            trainer.grpo_step(sample_groups(make_engine(trainer, version)))
        moved = torch.cat([(now.detach() - then).flatten()
                           for now, then in zip(named_tensors(trainer.model).values(), own, strict=True)])
        off[name] = float((_published(trainer) - before - moved).norm() / moved.norm())
    assert off["float16"] < 0.6 < 1.0 < off["bfloat16"]


def _published(trainer: PolicyTrainer) -> torch.Tensor:
    """All of it, in float32."""
    return torch.cat([(torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16
                       else torch.from_numpy(array)).float().flatten() for array in trainer.weights().values()])


def test_reset_goes_back_to_the_settings(groups) -> None:
    trainer = PolicyTrainer(make_settings())
    before = weights_digest(trainer.weights())
    trainer.grpo_step(groups)
    trainer.reset()
    assert weights_digest(trainer.weights()) == before
    assert trainer.updates == {"sft": 0, "policy": 0} and not trainer.optimizer.state
    assert trainer.settings.model == MODEL


def test_buckets_and_dtypes_do_not_change_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_weights, "BUCKET_BYTES", 40)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7), "c": torch.ones(30), "d": torch.zeros(0, 4),
               "e": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "f": torch.tensor(3.0)}
    copies = model_weights.host_copies(tensors.items())
    tensors["a"].zero_()
    assert copies["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and copies["b"].tolist() == 7
    assert {name: copy.shape for name, copy in copies.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert copies["e"].dtype == np.uint16 and copies["e"].tolist() == [0x3FC0, 0xC000]


@pytest.mark.parametrize("rank", [0, 4])
def test_recomputed_activations_change_no_bit_and_are_recomputed(groups, rank: int) -> None:
    if rank:
        pytest.importorskip("peft")
    results = []
    for recompute in (False, True):
        trainer = PolicyTrainer(make_settings(gradient_checkpointing=recompute, lora={"rank": rank}))
        passes = [0]
        inner = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0.mlp"))
        inner.register_forward_pre_hook(lambda *_, passes=passes: passes.__setitem__(0, passes[0] + 1))
        metrics = trainer.grpo_step(groups)
        results.append((metrics["grad_norm"], weights_digest(trainer.weights()), passes[0]))
    assert results[0][:2] == results[1][:2]
    assert results[1][2] == 2 * results[0][2]


def test_an_entropy_bonus_has_the_gradient_of_entropy(groups) -> None:
    """Tied groups have no policy gradient, so the whole loss is the bonus; its step raises the entropy."""
    tied = [replace(group, rewards=np.ones(group.samples, np.float32)) for group in groups]
    trainer = PolicyTrainer(make_settings(lr=1e-3, grpo={"entropy_coefficient": 0.5}))
    metrics = [trainer.grpo_step(tied) for _ in range(5)]
    assert metrics[0]["loss/total"] == pytest.approx(-0.5 * metrics[0]["entropy"], rel=1e-5)
    assert metrics[0]["loss/policy"] == 0.0 and metrics[0]["grad_norm"] > 0
    assert metrics[4]["entropy"] > metrics[0]["entropy"]
