"""Networks for control: distributions against torch's own, orthogonal weights, and how observations are laid out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_actor.actors.errors import BadValue
from cosmos_actor.simulator_bridge.contract import ArraySpec
from cosmos_actor.trainer.control_model import Categorical, ControlModel, DiagonalGaussian
from cosmos_actor.trainer.observations import ObservationLayout
from tests.trainer.make_control import BOX_ACTION, DISCRETE_ACTION, IMAGES, VECTORS, seen, settings


def test_a_categorical_is_torchs() -> None:
    logits = torch.randn(50, 5) * 3
    ours, theirs = Categorical(torch.log_softmax(logits, 1)), torch.distributions.Categorical(logits=logits)
    actions = theirs.sample()
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())


def test_a_diagonal_gaussian_is_torchs() -> None:
    mean, log_std = torch.randn(50, 3), torch.tensor([-1.0, 0.0, 0.5])
    ours, theirs = DiagonalGaussian(mean, log_std), torch.distributions.Normal(mean, log_std.exp())
    actions = theirs.sample()
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions).sum(1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(1))


@pytest.mark.parametrize("shared", [False, True])
def test_weights_are_orthogonal_with_their_gains_and_a_function_of_the_seed(shared: bool) -> None:
    one, two, other = (ControlModel(settings({"shared": shared}), VECTORS, BOX_ACTION, seed=seed) for seed in (3, 3, 4))
    assert (one.critic is None) is shared
    gains = ((one.actor.dense[2].weight, 2**0.5), (one.policy_head.weight, 0.01), (one.value_head.weight, 1.0))
    for matrix, gain in gains:
        torch.testing.assert_close(matrix @ matrix.T, gain**2 * torch.eye(len(matrix)), atol=1e-5, rtol=0)
    assert all(not tensor.any() for name, tensor in one.named_parameters() if "bias" in name or name == "log_std")
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    assert not torch.equal(one.value_head.weight, other.value_head.weight)


def test_making_a_model_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    ControlModel(settings(), VECTORS, DISCRETE_ACTION)
    assert torch.equal(torch.get_rng_state(), before)


def test_vectors_are_flattened_in_the_order_of_their_names() -> None:
    layout = ObservationLayout(VECTORS, kind="mlp")
    rows = seen(VECTORS, 5)
    found = layout(dict(reversed(rows.items())))
    assert layout.vector_width == 4 and found.vectors.dtype == np.float32 and found.images.shape == (5, 0, 1, 1)
    expected = np.concatenate([rows["grip"][:, None], rows["position"]], axis=1)
    assert found.vectors.tolist() == expected.astype(np.float32).tolist()


def test_images_are_stacked_channels_first_and_the_rest_joins_as_vectors() -> None:
    layout = ObservationLayout(IMAGES, kind="cnn")
    rows = seen(IMAGES, 2)
    found = layout(rows)
    assert layout.image_shape == found.images.shape[1:] == (4, 36, 40)
    assert (found.images[:, 0] == rows["camera"][..., 0]).all() and (found.images[:, 3] == rows["depth"]).all()
    assert found.vectors.shape == (2, 4)
    stacked = ObservationLayout({"frames": ArraySpec("uint8", (4, 84, 84))}, kind="cnn")
    assert stacked.image_shape == (4, 84, 84)
    assert ObservationLayout(IMAGES, kind="mlp").vector_width == 36 * 40 * 4 + 4


def test_the_network_of_images_is_natures() -> None:
    network = {"kind": "cnn", "hidden": (512,), "activation": "relu", "shared": True}
    model = ControlModel(settings(network), {"frames": ArraySpec("uint8", (4, 84, 84))}, DISCRETE_ACTION)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if "weight" in name}
    assert list(shapes.values()) == [
        (32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (3, 512), (1, 512)]


@pytest.mark.parametrize(("specs", "text"), [
    (VECTORS, "a cnn needs an image"),
    ({"small": ArraySpec("uint8", (16, 16, 3))}, "too small"),
    ({"a": ArraySpec("uint8", (40, 40, 3)), "b": ArraySpec("uint8", (48, 48, 3))}, "differ"),
])
def test_a_cnn_that_can_not_be_made_names_the_setting(specs, text: str) -> None:
    with pytest.raises(BadValue, match=rf"{text}.*control\.network\.kind"):
        ControlModel(settings({"kind": "cnn"}), specs, DISCRETE_ACTION)


def test_observations_that_are_not_as_described_are_refused() -> None:
    layout = ObservationLayout(VECTORS, kind="mlp")
    rows = seen(VECTORS, 5)
    with pytest.raises(ValueError, match="position is"):
        layout({**rows, "position": np.zeros((5, 4))})
    with pytest.raises(ValueError, match="the model reads"):
        layout({"position": rows["position"]})
