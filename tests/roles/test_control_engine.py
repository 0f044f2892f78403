"""The engine for control: what an action depends on, its probability, and that weights go in whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_actor.roles.control_engine import ControlEngine
from cosmos_actor.roles.control_forward import NumpyForward, TorchForward
from cosmos_actor.roles.drawing import choose, perturb, within_bounds
from cosmos_actor.roles.engine import HeldWeights, StaleWeights, WeightsRefused
from cosmos_actor.simulator_bridge.contract import BOX, ActionSpec
from cosmos_actor.weight_plane.digest import weights_digest
from tests.trainer.make_control import (
    BOX_ACTION,
    DISCRETE_ACTION,
    IMAGES,
    VECTORS,
    make_engine,
    make_trainer,
    seen,
    settings,
)

ACTIONS = {"discrete": DISCRETE_ACTION, "box": BOX_ACTION}


def scored(engine: ControlEngine, observations, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The model's own log-probs and values."""
    with torch.no_grad():
        policy, values = engine.model.distribution(engine.model.layout(observations).to(torch.device("cpu")))
        return policy.log_prob(engine.model.recorded(torch.from_numpy(actions))).numpy(), values.numpy()


def drawn(engine: ControlEngine, observations: dict[str, np.ndarray], seed: int = 0) -> np.ndarray:
    return engine.noise(np.random.default_rng(seed), len(next(iter(observations.values()))))


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("specs", [VECTORS, IMAGES], ids=["mlp", "cnn"])
def test_actions_are_scored_as_the_trainer_scores_them(action: ActionSpec, greedy: bool, specs) -> None:
    network = {"kind": "cnn", "shared": True, "hidden": (32,)} if specs is IMAGES else {}
    engine = make_engine(make_trainer(settings(network, normalise_observations=True), action, observations=specs))
    observations = seen(specs, 9)
    actions, logprobs, values = engine.act(observations, None if greedy else drawn(engine, observations))
    shape = (9,) if action is DISCRETE_ACTION else (9, 2, 1)
    assert actions.shape == shape and actions.dtype == np.dtype(action.dtype)
    assert logprobs.dtype == values.dtype == np.float32
    expected = scored(engine, observations, actions)
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-5)
    np.testing.assert_allclose(values, expected[1], atol=1e-5)
    np.testing.assert_allclose(engine.values(observations), values, atol=1e-6)


@pytest.mark.parametrize("network", [
    {}, {"shared": True}, {"activation": "relu", "hidden": (128, 128)}, {"hidden": (256,)},
])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_numpy_and_torch_give_the_same(network, normalise: bool, rows: int) -> None:
    trainer = make_trainer(settings(network, normalise_observations=normalise), BOX_ACTION)
    if normalise:
        trainer.model.seen_moments.include(np.random.default_rng(0).normal(3.0, 2.0, (100, 4)))
    engine = make_engine(trainer)
    assert isinstance(engine._drawing._forward, NumpyForward)
    offered = engine.model.layout(seen(VECTORS, rows))
    for ours, theirs in zip(engine._drawing._forward.policy_and_values(offered),
                            TorchForward(engine.model).policy_and_values(offered), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_large_networks_and_images_are_torchs() -> None:
    assert isinstance(make_engine(make_trainer(settings({"hidden": (1024,)})))._drawing._forward, TorchForward)
    images = make_trainer(settings({"kind": "cnn"}), observations=IMAGES)
    assert isinstance(make_engine(images)._drawing._forward, TorchForward)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_the_same_noise_gives_the_same_actions_whoever_else_is_in_the_batch(action: ActionSpec) -> None:
    engine = make_engine(make_trainer(action=action))
    observations = seen(VECTORS, 64)
    noise = drawn(engine, observations, 5)
    first = engine.act(observations, noise)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, engine.act(observations, noise), strict=True))
    assert first[0].tobytes() != engine.act(observations, drawn(engine, observations, 6))[0].tobytes()
    some = engine.act({name: column[:8] for name, column in observations.items()}, noise[:8])
    np.testing.assert_allclose(some[0], first[0][:8], atol=1e-6)
    greedy = engine.act(observations, None)
    assert (greedy[1] >= first[1] - 1e-6).all()


def test_discrete_actions_are_drawn_with_their_probabilities() -> None:
    logits = np.array([[0.0, 1.0, -1.0, -np.inf]], np.float32).repeat(20_000, axis=0)
    actions, logprobs = choose(logits, np.random.default_rng(0).random(20_000))
    expected = np.exp([0.0, 1.0, -1.0, -np.inf]) / np.exp([0.0, 1.0, -1.0]).sum()
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 20_000, expected, atol=0.01)
    np.testing.assert_allclose(np.exp(logprobs), expected[actions], rtol=1e-5)


@pytest.mark.parametrize(("uniform", "action"), [(0.0, 1), (1.0 - 2**-53, 2)])
def test_the_ends_of_the_noise_choose_possible_actions(uniform: float, action: int) -> None:
    logits = np.array([[-np.inf, 0.3, 0.1, -np.inf]], np.float32)
    actions, logprobs = choose(logits, np.array([uniform]))
    assert actions.tolist() == [action] and np.isfinite(logprobs).all()


def test_box_actions_have_the_mean_and_the_std_of_the_policy() -> None:
    log_std = np.array([-1.0, 0.5], np.float32)
    means = np.array([[2.0, -3.0]], np.float32).repeat(20_000, axis=0)
    actions, _ = perturb(means, log_std, np.random.default_rng(0).standard_normal((20_000, 2), dtype=np.float32))
    np.testing.assert_allclose(actions.mean(axis=0), means[0], atol=0.03)
    np.testing.assert_allclose(actions.std(axis=0), np.exp(log_std), rtol=0.02)


def test_a_simulator_is_told_what_is_within_bounds() -> None:
    actions = np.array([[[-3.0], [3.0]], [[0.1], [0.2]]], np.float32)
    assert within_bounds(actions, BOX_ACTION).tolist() == np.array([[[-1], [0.5]], [[0.1], [0.2]]], np.float32).tolist()
    assert within_bounds(actions, ActionSpec(BOX, shape=(2, 1))) is actions
    discrete = np.array([0, 2])
    assert within_bounds(discrete, DISCRETE_ACTION) is discrete


def test_weights_are_swapped_whole_and_named_by_what_is_held() -> None:
    trainer, other = make_trainer(settings(normalise_observations=True)), make_trainer(seed=9)
    engine = ControlEngine(trainer.settings, VECTORS, DISCRETE_ACTION)
    assert engine.held == HeldWeights(-1, "")
    weights = trainer.weights()
    digest = weights_digest(weights)
    assert engine.load_weights(weights, 0, digest) == digest and engine.held == HeldWeights(0, digest)
    before = engine.values(seen(VECTORS, 4)).tolist()
    with pytest.raises(StaleWeights):
        engine.load_weights(weights, 0, digest)
    with pytest.raises(WeightsRefused, match="its manifest says"):
        engine.load_weights(weights, 1, "0" * 64)
    with pytest.raises(WeightsRefused, match=r"missing seen_moments"):
        engine.load_weights(other.weights(), 1, weights_digest(other.weights()))
    assert engine.held == HeldWeights(0, digest) and engine.values(seen(VECTORS, 4)).tolist() == before
    assert engine.statistics()["swaps"] == 1


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_new_weights_change_all_that_an_act_computes(action: ActionSpec) -> None:
    """The moments and the log-std too, which the engine keeps apart from the model."""
    trainer = make_trainer(settings(normalise_observations=True), action)
    engine = make_engine(trainer, version=0)
    with torch.no_grad():
        for tensor in trainer.model.parameters():
            tensor.add_(0.1)
    trainer.model.seen_moments.include(np.random.default_rng(0).normal(3.0, 2.0, (100, 4)))
    weights = trainer.weights()
    engine.load_weights(weights, 1, weights_digest(weights))
    observations = seen(VECTORS, 16)
    noise = drawn(engine, observations)
    found = engine.act(observations, noise)
    expected = make_engine(trainer).act(observations, noise)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))
    np.testing.assert_allclose(found[1], scored(engine, observations, found[0])[0], atol=1e-5)
