"""An adapter alone is trained, published, proved, saved and loaded; its base stays what it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_actor.actors.errors import BadValue, UserError
from cosmos_actor.recipes.resolve import resolve
from cosmos_actor.roles.engine import WeightsRefused
from cosmos_actor.roles.torch_engine import TorchEngine
from cosmos_actor.trainer.adapter import BASE_DIGEST, base_digest_of, load_served_model, load_trained_model
from cosmos_actor.trainer.batch import batch_from_examples, batch_from_groups
from cosmos_actor.trainer.checkpoint import CheckpointError, verify
from cosmos_actor.trainer.models import load_model
from cosmos_actor.trainer.policy import PolicyTrainer
from cosmos_actor.trainer.scorer import Scorer
from cosmos_actor.trainer.settings import TrainerSettings
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make import EXAMPLES, MODEL, make_engine, make_settings, sample_groups

pytest.importorskip("peft")
LORA = {"rank": 4, "alpha": 8.0}


def settings_with(publish: str = "adapter", **fields) -> TrainerSettings:
    lora = {**LORA, "publish": publish, **fields.pop("lora", {})}
    return make_settings(**{"lora": lora, **fields})


def deliver(trainer: PolicyTrainer, engine: TorchEngine, version: int) -> str:
    weights = trainer.weights()
    return engine.load_weights(weights, version, weights_digest(weights))


def trained(settings: TrainerSettings, steps: int = 3) -> PolicyTrainer:
    trainer = PolicyTrainer(settings)
    for _ in range(steps):
        trainer.sft_step(batch_from_examples(EXAMPLES))
    return trainer


@pytest.fixture(scope="module")
def groups():
    return sample_groups(make_engine(PolicyTrainer(make_settings())))


def test_an_adapter_of_no_steps_is_exactly_the_base(groups) -> None:
    batch = batch_from_groups(groups)
    base, adapted = PolicyTrainer(make_settings()), PolicyTrainer(settings_with())
    assert (base.score(batch) == adapted.score(batch)).all()
    merged = PolicyTrainer(settings_with("merged"))
    assert weights_digest(merged.weights()) == weights_digest(base.weights()) == adapted.base_digest


def test_only_the_adapter_is_trained_and_it_learns_other_answers_than_its_base_gives(tmp_path: Path) -> None:
    trained(make_settings(), 60).model.save_pretrained(tmp_path)
    trainer = PolicyTrainer(settings_with(lr=1e-2, model=str(tmp_path)))
    frozen = {name: tensor.clone() for name, tensor in trainer.model.named_parameters() if not tensor.requires_grad}
    other = [(prompt, EXAMPLES[place - 1][1]) for place, (prompt, _) in enumerate(EXAMPLES)]
    losses = [trainer.sft_step(batch_from_examples(other))["loss/total"] for _ in range(40)]
    assert losses[0] > 3.0 and losses[-1] < 0.1
    assert len(frozen) == len(PolicyTrainer(make_settings()).weights())
    for name, tensor in trainer.model.named_parameters():
        assert tensor.requires_grad == (".lora_" in name)
        assert name not in frozen or torch.equal(tensor, frozen[name])


def test_a_policy_update_raises_the_reward_that_it_was_given(groups) -> None:
    """The likelihood of the samples with the higher rewards grows under updates on them."""
    trainer = PolicyTrainer(settings_with(lr=1e-2))
    batch, rows = trainer.policy_batch(groups)
    gains = [float((trainer.score(batch) * batch.advantages).sum())]
    for _ in range(4):
        trainer.policy_step(batch, rows)
        gains.append(float((trainer.score(batch) * batch.advantages).sum()))
    assert gains[-1] > gains[0] + 0.1


def test_what_is_published_are_the_adapters_tensors_and_the_digest_of_the_base() -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    trainer = trained(settings_with())
    published = trainer.weights()
    theirs = get_peft_model(load_model(MODEL), LoraConfig(r=4, target_modules=list(trainer.settings.lora.targets)))
    assert set(published) - {BASE_DIGEST} == set(get_peft_model_state_dict(theirs))
    assert published[BASE_DIGEST].tobytes().hex() == weights_digest(PolicyTrainer(make_settings()).weights())
    full = sum(array.nbytes for array in PolicyTrainer(make_settings()).weights().values())
    assert sum(array.nbytes for array in published.values()) < full / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_engine_and_scorer_report_the_digest_of_what_they_hold(publish: str, dtype: str) -> None:
    trainer = trained(settings_with(publish, publish_dtype=dtype))
    digest, engine = weights_digest(trainer.weights()), make_engine(trainer)
    assert engine.held.digest == digest
    scorer = Scorer(trainer.settings)
    assert scorer.load_weights(trainer.weights(), 0, digest) == digest
    trainer.sft_step(batch_from_examples(EXAMPLES))
    assert deliver(trainer, engine, 1) == weights_digest(trainer.weights()) != digest


@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_the_engine_and_the_trainer_agree_on_logprobs_over_versions(publish: str) -> None:
    trainer = trained(settings_with(publish))
    engine = make_engine(trainer)
    for version in range(1, 4):
        metrics = trainer.grpo_step(sample_groups(engine, seed=version))
        assert metrics["mismatch/max"] < 1e-5
        deliver(trainer, engine, version)


def test_a_flipped_byte_of_the_adapter_an_engine_holds_changes_its_digest() -> None:
    from cosmos_actor.trainer.model_weights import named_tensors, weights_digest_of

    trainer = trained(settings_with())
    engine = make_engine(trainer)
    name = next(name for name in named_tensors(engine.model) if name.endswith("lora_B.weight"))
    named_tensors(engine.model)[name][0, 0] += 1.0
    assert weights_digest_of(engine.model) != engine.held.digest


def test_an_adapter_for_another_base_is_refused_and_nothing_changes() -> None:
    trainer = trained(settings_with())
    other = TorchEngine(load_served_model(settings_with(seed=7), "cpu"), stop_ids=(2,), pad_id=0)
    held = other.generate([], None), other.held
    weights = trainer.weights()
    with pytest.raises(WeightsRefused, match=r"base with digest .*policy\.model is not the same files"):
        other.load_weights(weights, 1, weights_digest(weights))
    assert ([], other.held) == held
    whole = PolicyTrainer(make_settings()).weights()
    with pytest.raises(WeightsRefused, match="missing base_model"):
        other.load_weights(whole, 1, weights_digest(whole))


def test_merged_is_what_peft_merges(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = trained(settings_with("merged"))
    trainer.save(tmp_path)
    theirs = PeftModel.from_pretrained(load_model(MODEL), tmp_path / "adapter").merge_and_unload()
    ours = trainer.weights()
    for name, tensor in theirs.named_parameters():
        np.testing.assert_allclose(ours[name], tensor.detach().numpy(), rtol=1e-6, atol=1e-7)


def test_peft_loads_a_checkpoints_adapter_and_computes_the_same_logits(tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = trained(settings_with())
    trainer.save(tmp_path)
    theirs = PeftModel.from_pretrained(load_model(MODEL), tmp_path / "adapter").eval()
    tokens = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 9, 10, 2]])
    with torch.no_grad():
        ours, again = trainer.model(input_ids=tokens).logits, theirs(input_ids=tokens).logits
    assert torch.equal(ours, again)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == MODEL and config["r"] == 4


@pytest.mark.parametrize("before", [0, 3])
def test_a_resumed_adapter_goes_on_bit_for_bit(tmp_path: Path, groups, before: int) -> None:
    straight = trained(settings_with(), before)
    straight.save(tmp_path / "policy")
    verify(tmp_path / "policy")
    resumed = trained(settings_with(), 1)
    resumed.load(tmp_path / "policy")
    batch = batch_from_examples(EXAMPLES)
    for _ in range(2):
        assert straight.sft_step(batch)["loss/total"] == resumed.sft_step(batch)["loss/total"]
        assert straight.grpo_step(groups)["loss/total"] == resumed.grpo_step(groups)["loss/total"]
    assert weights_digest(straight.weights()) == weights_digest(resumed.weights())
    assert straight.updates == resumed.updates


def test_a_checkpoint_has_the_adapter_and_not_the_base(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    trainer = trained(settings_with())
    trainer.save(tmp_path)
    parts = {part: FileSystemReader(tmp_path / part).read_metadata().state_dict_metadata for part in ("model", "optim")}
    assert len(parts["model"]) == len(trainer.weights()) - 1 and all(".lora_" in name for name in parts["model"])
    assert all(".lora_" in name for name in parts["optim"] if name.startswith("state."))


@pytest.mark.parametrize(("first", "second", "line"), [
    (settings_with(), make_settings(), "is of an adapter, and policy.lora.rank asks for a whole model"),
    (make_settings(), settings_with(), "is of a whole model, and policy.lora.rank asks for an adapter"),
    (settings_with(), settings_with(seed=7), "for a base with digest .* has .* now"),
])
def test_the_checkpoint_of_another_base_is_refused(tmp_path: Path, first, second, line: str) -> None:
    trained(first, 1).save(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=line):
        PolicyTrainer(second).load(tmp_path / "policy")


def test_the_adapter_is_a_function_of_the_seed_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    first, second = (load_trained_model(settings_with(), "cpu") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert base_digest_of(first) and not base_digest_of(load_trained_model(make_settings(), "cpu"))


@pytest.mark.parametrize(("targets", "line"), [
    (("q_proj", "query"), "has 'query', the model has down_proj, gate_proj, k_proj, lm_head"),
    (("lm_head",), "whose matrix the embedding shares"),
])
def test_targets_that_can_have_no_adapter_are_refused(targets, line: str) -> None:
    with pytest.raises(BadValue, match=line):
        PolicyTrainer(settings_with(lora={"targets": targets}))


@pytest.mark.parametrize(("recipe", "flags", "line"), [
    ("grpo-arithmetic", ["rollout.engine=vllm", "rollout.tensor_parallel=2"], r"policy\.lora\.publish = \"merged\""),
    ("ppo-cartpole", [], r"policy\.lora\.rank = 4"),
])
def test_who_can_not_take_an_adapter_is_refused_by_name(recipe: str, flags: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        resolve(recipe, ["policy.lora.rank=4", *flags])
    resolve("grpo-arithmetic", ["policy.lora.rank=4", "policy.lora.publish=merged", "rollout.engine=vllm"])
