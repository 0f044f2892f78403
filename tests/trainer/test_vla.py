"""The vision-language-action policy: what it depends on, that its likelihood is the trainer's, and that it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.simulator_bridge.contract import BOX, DISCRETE, ActionSpec, ArraySpec, Description, TaskSpec
from cosmos_actor.trainer.batch import BatchError
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.instructions import INSTRUCTION, WORDS, Instructions, observations_of, words_of
from cosmos_actor.trainer.vla_model import shifted
from tests.trainer.make_control import make_batch, make_engine, make_trainer, seen

ACTION = ActionSpec(BOX, shape=(3,), low=(-1.0,) * 3, high=(1.0,) * 3)
SIM = Description("test:vla", [TaskSpec("left", 10, instruction="push it to the left"), TaskSpec("right", 10)],
                  {"agent": ArraySpec("uint8", (16, 32, 3)), "wrist": ArraySpec("uint8", (16, 32, 3)),
                   "state": ArraySpec("float32", (4,))}, ACTION)
SPECS = observations_of(SIM, kind="vla")
SMALL = {"chunk": 4, "steps": 2, "width": 32, "heads": 2, "layers": 1, "head_layers": 1}


def settings(flow: dict[str, Any] | None = None, cloning: dict[str, Any] | None = None, **more: Any) -> ControlSettings:
    network, ppo = more.pop("network", {}), more
    return ControlSettings.model_validate({
        "network": {"kind": "vla", "shared": True, **network}, "flow": {**SMALL, **(flow or {})},
        "cloning": {"shift": 2, **(cloning or {})}, "ppo": {"normalise_observations": True, **ppo}})


def trainer_of(chosen: ControlSettings | None = None, **more: Any):
    return make_trainer(chosen or settings(), ACTION, observations=SPECS, **more)


def shown(rows: int, seed: int = 0) -> dict[str, Any]:
    """Demonstrations whose actions follow from the state and the instruction."""
    observations = seen(SPECS, rows, seed)
    observations["state"] = np.clip((observations["state"] - 1) / 6, -1, 1)
    side = np.where(np.arange(rows) % 2 == 0, -0.5, 0.5).astype(np.float32)
    told = Instructions(SIM, kind="vla").told(["left", "right"])[INSTRUCTION]
    observations[INSTRUCTION] = told[np.arange(rows) % 2]
    actions = np.repeat(observations["state"][:, None, :3] * 0.3 + side[:, None, None], 4, axis=1).astype(np.float32)
    return {"observations": observations, "actions": actions, "mask": np.ones((rows, 4), np.uint8)}


def test_words_are_numbers_and_the_same_everywhere() -> None:
    row = words_of("Pick up the RED cup!")
    assert row.dtype == np.int32 and row.shape == (WORDS,)
    assert row[:5].tolist() == words_of("pick up, the red cup").tolist()[:5] and not row[5:].any() and row[:5].all()
    assert row[0] == 3334  # crc32, as on every machine
    assert words_of("one " * 100).all()
    assert Instructions(SIM, kind="cnn").told(["left"]) == {}
    assert observations_of(SIM, kind="cnn") == SIM.observations


@pytest.mark.parametrize("greedy", [False, True])
def test_a_chain_is_scored_as_the_trainer_scores_it(greedy: bool) -> None:
    trainer = trainer_of()
    trainer.clone(shown(32))
    engine, observations = make_engine(trainer), seen(SPECS, 6)
    noise = None if greedy else engine.noise(np.random.default_rng(0), 6)
    chains, logprobs, values = engine.act(observations, noise)
    assert chains.shape == (6, 3, 4, 3) and chains.dtype == np.float32
    scored = trainer.scorer.score(observations, chains)
    np.testing.assert_allclose(scored[0], logprobs, atol=2e-4)
    np.testing.assert_allclose(scored[1], values, atol=1e-5)
    np.testing.assert_allclose(trainer.scorer.values(observations), values, atol=1e-5)
    np.testing.assert_allclose(engine.values(observations), values, atol=1e-5)
    commands = engine.commands(chains)
    assert commands.shape == (6, 4, 3) and np.abs(commands).max() <= 1.0


def test_the_likeliest_chunk_is_a_function_of_what_is_seen_and_the_rows_key() -> None:
    engine, observations = make_engine(trainer_of()), seen(SPECS, 3)
    start = engine.start([(5, 0), (5, 8), (5, 0)])
    assert start.shape == (3, 4, 3) and np.array_equal(start[0], start[2]) and not np.array_equal(start[0], start[1])
    chains, logprobs, _ = engine.act(observations, start)
    assert np.array_equal(chains[:, 0], start) and np.isfinite(logprobs).all()
    assert np.array_equal(engine.act(observations, start)[0], chains)
    assert make_engine(make_trainer()).start([(5, 0)]) is None  # nothing is drawn for a categorical one


def test_an_answer_depends_on_its_own_row_only() -> None:
    engine, observations = make_engine(trainer_of()), seen(SPECS, 6)
    noise = engine.noise(np.random.default_rng(0), 6)
    whole = engine.act(observations, noise)
    alone = engine.act({name: column[4:5] for name, column in observations.items()}, noise[4:5])
    for one, of_all in zip(alone, whole, strict=True):
        np.testing.assert_allclose(one[0], of_all[4], atol=1e-4)


def test_it_reads_its_instruction() -> None:
    trainer = trainer_of()
    for update in range(3):
        trainer.clone(shown(32, update))
    engine, observations = make_engine(trainer), seen(SPECS, 2)
    other = {**observations, INSTRUCTION: np.stack([words_of("something else")] * 2)}
    assert np.abs(engine.act(observations, None)[0] - engine.act(other, None)[0])[:, -1].max() > 1e-6


def test_the_first_ratio_is_one_and_updates_are_repeatable() -> None:
    trainer, twin = trainer_of(), trainer_of()
    batch = make_batch(make_engine(trainer), SPECS, steps=32)
    first = trainer.update(batch)
    assert first["ratio/first"] < 1e-3 and first["kl/old"] >= 0
    again = twin.update(batch)
    assert {name: again[name] for name in again if "seconds" not in name} == {
        name: first[name] for name in first if "seconds" not in name}
    assert all(np.array_equal(one, two) for one, two in zip(trainer.weights().values(), twin.weights().values(),
                                                            strict=True))


def test_cloning_learns_what_was_shown_by_state_and_instruction() -> None:
    trainer = trainer_of(settings(cloning={"learning_rate": 3e-3, "shift": 0}), cloning=120)
    losses = [trainer.clone(shown(32, update))["loss/cloning"] for update in range(120)]
    held_out = shown(64, 10_000)
    engine = make_engine(trainer)
    start = engine.start([(7, row) for row in range(64)])
    commands = engine.commands(engine.act(held_out["observations"], start)[0])
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert np.abs(commands - held_out["actions"]).mean() < 0.5 * np.abs(held_out["actions"]).mean()


def test_what_is_after_the_end_of_an_episode_is_not_learned() -> None:
    one, two = shown(16), shown(16)
    for batch in (one, two):
        batch["mask"][:, 2:] = 0
    two["actions"][:, 2:] = 7.0
    losses = [trainer_of().clone(batch)["loss/cloning"] for batch in (one, two)]
    assert losses[0] == losses[1]


def test_too_few_demonstrations_are_one_line() -> None:
    with pytest.raises(BatchError, match="lower control.cloning.mini_batches"):
        trainer_of(settings(cloning={"mini_batches": 4})).clone(shown(3))


@pytest.mark.parametrize("shared", [False, True])
def test_the_critic_can_go_first_and_leaves_the_actor_alone(shared: bool) -> None:
    trainer = trainer_of(settings(critic_first=1, network={"shared": shared}))
    batch, before = make_batch(make_engine(trainer), SPECS, steps=32), trainer.weights()
    trainer.update(batch)
    changed = {name for name, tensor in trainer.weights().items() if not np.array_equal(tensor, before[name])}
    assert changed and all("value" in name or "moments" in name for name in changed)
    trainer.update(make_batch(make_engine(trainer, 1), SPECS, steps=32))
    changed = {name for name, tensor in trainer.weights().items() if not np.array_equal(tensor, before[name])}
    assert any(name.startswith("head.") for name in changed)


def test_the_critics_first_updates_leave_nothing_in_the_optimiser() -> None:
    """Adam's second moments of gradients that were zero make the actor's first steps after them two times too long."""
    trainer, fresh = (trainer_of(settings(critic_first=first, learning_rate=1e-3)) for first in (2, 0))
    for update in range(2):
        trainer.update(make_batch(make_engine(trainer, update), SPECS, steps=32))
    fresh.model.load_state_dict(trainer.model.state_dict())
    fresh.updates["ppo"] = 2
    batch = make_batch(make_engine(trainer, 2), SPECS, steps=32)
    trainer.update(batch), fresh.update(batch)
    assert all(np.array_equal(one, two) for one, two in zip(trainer.weights().values(), fresh.weights().values(),
                                                            strict=True))


def test_ppo_raises_the_probability_of_what_was_good() -> None:
    trainer = trainer_of(settings(learning_rate=1e-3, epochs=2, mini_batches=2, anneal=False, clip_value=False))
    means = []
    for update in range(15):
        engine = make_engine(trainer, update)
        batch = make_batch(engine, SPECS, steps=48, seed=update)
        chunks = engine.commands(batch["actions"])
        batch["rewards"] = -np.abs(chunks - 0.5).mean(axis=(1, 2)).astype(np.float32)
        batch["boundary"] = np.ones(48, bool)
        batch["bootstrap"] = np.zeros(48, np.float32)
        trainer.update(batch)
        means.append(float(batch["rewards"].mean()))
    assert np.mean(means[-5:]) > np.mean(means[:5]) + 0.05


@pytest.mark.parametrize("reinforced", [False, True])
def test_a_checkpoint_goes_on_to_the_last_bit(tmp_path, reinforced: bool) -> None:
    trainer, other = trainer_of(), trainer_of()
    trainer.clone(shown(16))
    if reinforced:
        trainer.update(make_batch(make_engine(trainer), SPECS, steps=16))
    trainer.save(tmp_path)
    other.load(tmp_path)
    batch = make_batch(make_engine(trainer, 1), SPECS, steps=16, seed=1)
    trainer.update(batch), other.update(batch)
    assert all(np.array_equal(one, two) for one, two in zip(trainer.weights().values(), other.weights().values(),
                                                            strict=True))


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(BadValue, match="discrete"):
        make_trainer(settings(), ActionSpec(DISCRETE, n=2), observations=SPECS)
    with pytest.raises(BadValue, match="needs an image"):
        make_trainer(settings(), ACTION, observations={"state": ArraySpec("float32", (4,))})
    with pytest.raises(ValueError, match="does not divide"):
        settings({"heads": 3})


def test_images_are_moved_and_their_edges_repeated() -> None:
    images = torch.arange(2 * 1 * 6 * 6, dtype=torch.uint8).reshape(2, 1, 6, 6)
    moved = shifted(images, 2, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images.float(), (2,) * 4, mode="replicate").to(torch.uint8)
    windows = [padded[row, :, down:down + 6, right:right + 6] for row in range(2) for down in range(5)
               for right in range(5)]
    assert all(any(torch.equal(one, window) for window in windows) for one in moved)
    assert shifted(images, 0, torch.Generator()) is images
