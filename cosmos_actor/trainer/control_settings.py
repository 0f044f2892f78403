"""Settings of PPO for control. Importable without torch. The defaults are those of cleanRL's ppo.py for CartPole."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cosmos_actor.actors.settings import Settings, setting

Width = Annotated[int, Field(ge=1)]


class NetworkSettings(Settings):
    """The actor and the critic. What an action is decides the distribution: discrete is categorical, box is a diagonal
    Gaussian whose log-std is a weight of its own and no function of what is seen."""

    kind: Literal["mlp", "cnn"] = setting(
        "mlp", "mlp flattens all that is seen; cnn has the three convolutions of Mnih et al. 2015 for uint8 images")
    hidden: tuple[Width, ...] = setting(
        (64, 64), "widths of the dense layers, after the convolutions of a cnn (there: 512)", unit="units",
        strict=False, min_length=1)
    activation: Literal["tanh", "relu"] = setting("tanh", "between dense layers; convolutions always have relu")
    shared: bool = setting(False, "actor and critic share all layers but the last; usual for images")


class PpoSettings(Settings):
    """Proximal policy optimisation (Schulman et al. 2017) as cleanRL writes it down."""

    learning_rate: float = setting(2.5e-4, "Adam's step size at the first update", ge=0.0)
    anneal: bool = setting(True, "the step size falls linearly to zero over the updates of the run")
    epochs: int = setting(4, "passes over the data of one update", unit="epochs", ge=1)
    mini_batches: int = setting(4, "optimiser steps in one pass", ge=1)
    clip: float = setting(0.2, "the ratio counts within 1 ± this", gt=0.0, lt=1.0)
    clip_value: bool = setting(True, "the value moves by at most `clip` from what it was when the data were made")
    entropy_coefficient: float = setting(0.01, "weight of the policy's entropy, which is raised", ge=0.0)
    value_coefficient: float = setting(0.5, "weight of the value loss, which already has its own half", ge=0.0)
    max_grad_norm: float = setting(0.5, "gradients are scaled down to this norm; 0 never scales", ge=0.0)
    discount: float = setting(0.99, "worth of a reward one step later", ge=0.0, le=1.0)
    gae_lambda: float = setting(0.95, "0 trusts the value after one step, 1 waits for all rewards", ge=0.0, le=1.0)
    estimator: Literal["gae", "vtrace"] = setting(
        "gae", "of advantages; vtrace corrects data that an older policy made, with values of the present one")
    rho_bar: float = setting(1.0, "vtrace: cap on the weight of a step's own error", gt=0.0)
    c_bar: float = setting(1.0, "vtrace: cap on how much of later errors is passed back", gt=0.0)
    normalise_advantage: bool = setting(True, "to mean 0 and std 1 in each mini-batch")
    target_kl: float = setting(
        0.0, "no further pass once the policy is this far from the old one; 0 makes all passes", unit="nats", ge=0.0)
    bootstrap_truncated: bool = setting(
        False, "a cut-off episode goes on in the value of its last observation; false takes it for an end, as cleanRL")
    normalise_observations: bool = setting(
        False, "by the running mean and std of all seen so far, clipped to ±10; images never are")
    normalise_rewards: bool = setting(
        False, "divide by the running std of the discounted return, clipped to ±10")


class ControlSettings(Settings):
    """A policy for control and how it is updated."""

    network: NetworkSettings = setting(NetworkSettings, "what is trained")
    ppo: PpoSettings = setting(PpoSettings, "how")
    device: str = setting("cpu", "cpu, cuda, or auto; small networks are faster on the cpu",
                          pattern="^(auto|cpu|cuda)$")
    threads: int = setting(1, "compute threads; sums depend on their number, so it is fixed", ge=1)
