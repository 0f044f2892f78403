"""Settings of PPO for control. Importable without torch. The defaults are those of cleanRL's ppo.py for CartPole."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cosmos_actor.actors.settings import Settings, setting

Width = Annotated[int, Field(ge=1)]


class NetworkSettings(Settings):
    """The actor and the critic. What an action is decides the distribution: discrete is categorical, box is a diagonal
    Gaussian whose log-std is a weight of its own and no function of what is seen. A vla draws chunks by a flow."""

    kind: Literal["mlp", "cnn", "vla"] = setting(
        "mlp", "mlp flattens all that is seen; cnn has the three convolutions of Mnih et al. 2015 for uint8 images; "
        "vla sees, reads the task's instruction and draws chunks of box actions (control.flow)")
    hidden: tuple[Width, ...] = setting(
        (64, 64), "widths of the dense layers, after the convolutions of a cnn (there: 512)", unit="units",
        strict=False, min_length=1)
    activation: Literal["tanh", "relu"] = setting("tanh", "between dense layers; convolutions always have relu")
    shared: bool = setting(
        False, "actor and critic share all layers but the last; usual for images. A vla's critic always reads what its "
        "actor sees; shared lets it also teach how to see")


class FlowSettings(Settings):
    """A vla: a transformer over cameras, words and state, and a flow-matching head for chunks of actions."""

    chunk: int = setting(8, "actions drawn at once, which the simulator executes one after the other", unit="actions",
                         ge=1)
    steps: int = setting(4, "of the sampler, from noise to actions", ge=1)
    eta: float = setting(0.5, "noise of the sampler that explores, whose steps then have a likelihood (flow-SDE); an "
                         "evaluation has none", gt=0.0)
    noisy_steps: int = setting(
        0, "the last so many steps of the sampler are noisy, the others follow the ODE; early noise explores little "
        "and blurs the gradient; 0 = all", unit="steps", ge=0)
    correlation: float = setting(
        0.0, "of the noise of a chunk's actions with each other; independent noise averages itself out over a chunk, "
        "and explores little", ge=0.0, lt=1.0)
    width: int = setting(256, "of the transformer's tokens", unit="units", ge=8)
    heads: int = setting(4, "of its attention; they divide the width", ge=1)
    layers: int = setting(4, "over what is seen", ge=0)
    head_layers: int = setting(3, "of the flow head", ge=1)

    @model_validator(mode="after")
    def _heads_divide(self) -> FlowSettings:
        if self.width % self.heads:
            raise ValueError(f"control.flow.heads = {self.heads} does not divide control.flow.width = {self.width}")
        return self


class CloningSettings(Settings):
    """Behaviour cloning on demonstrations, before the first reward (policy.sft_steps updates of policy.sft_batch)."""

    demonstrations: str = setting("", "folder of a LeRobot dataset, as `cosmos-actor sim record` writes one",
                                  resumable=True)
    learning_rate: float = setting(3e-4, "Adam's step size at the first update", ge=0.0)
    anneal: bool = setting(True, "the step size falls along half a cosine to zero over the updates")
    mini_batches: int = setting(1, "optimiser steps that one batch of demonstrations is split into", ge=1)
    shift: int = setting(4, "images are moved by up to so many pixels each way, a new way each time", unit="pixels",
                         ge=0)


class PpoSettings(Settings):
    """Proximal policy optimisation (Schulman et al. 2017) as cleanRL writes it down."""

    learning_rate: float = setting(2.5e-4, "Adam's step size at the first update", ge=0.0)
    value_learning_rate: float = setting(
        0.0, "Adam's step size for what only the critic has, whose gradient then has its own bound; a cloned policy "
        "moves slowly, its new critic must not; 0 = learning_rate, and one bound for both", ge=0.0)
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
    kl_coefficient: float = setting(
        0.0, "weight of the k3 estimate of KL(policy || reference), whose reference is the policy as PPO found it; 0 "
        "starts no reference", ge=0.0)
    normalise_advantage: bool = setting(True, "to mean 0 and std 1 in each mini-batch")
    target_kl: float = setting(
        0.0, "no further pass once the policy is this far from the old one; 0 makes all passes", unit="nats", ge=0.0)
    bootstrap_truncated: bool = setting(
        False, "a cut-off episode goes on in the value of its last observation; false takes it for an end, as cleanRL")
    critic_first: int = setting(
        0, "updates at the beginning that train the critic alone: of a cloned policy it knows nothing yet",
        unit="updates", ge=0)
    normalise_observations: bool = setting(
        False, "by the running mean and std of all seen so far, clipped to ±10; images never are")
    normalise_rewards: bool = setting(
        False, "divide by the running std of the discounted return, clipped to ±10")


class ControlSettings(Settings):
    """A policy for control and how it is updated."""

    network: NetworkSettings = setting(NetworkSettings, "what is trained")
    flow: FlowSettings = setting(FlowSettings, "used when control.network.kind = \"vla\"")
    cloning: CloningSettings = setting(CloningSettings, "what a policy is shown first")
    ppo: PpoSettings = setting(PpoSettings, "how")
    device: str = setting("cpu", "cpu, cuda, or auto; small networks are faster on the cpu",
                          pattern="^(auto|cpu|cuda)$")
    threads: int = setting(1, "compute threads; sums depend on their number, so it is fixed", ge=1)
