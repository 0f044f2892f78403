"""Settings of the trainer. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from cosmos_actor.actors.settings import Settings, setting

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]


class OptimizerSettings(Settings):
    """AdamW."""

    learning_rate: float = setting(1e-6, "step size of the policy update after warm-up", ge=0.0)
    beta1: float = setting(0.9, "memory of the first moment", ge=0.0, lt=1.0)
    beta2: float = setting(0.95, "memory of the second moment; below 0.999 because rewards drift", ge=0.0, lt=1.0)
    epsilon: float = setting(1e-8, "keeps the step finite where gradients vanish", gt=0.0)
    weight_decay: float = setting(0.0, "decoupled decay of matrices; norms and biases have none", ge=0.0)
    warmup_steps: int = setting(0, "learning rate rises linearly over these", unit="updates", ge=0)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this norm; 0 never scales", ge=0.0)


class SftSettings(Settings):
    """Supervised steps before the policy is rewarded."""

    learning_rate: float = setting(1e-3, "step size of a supervised update", ge=0.0)
    warmup_steps: int = setting(0, "learning rate rises linearly over these", unit="updates", ge=0)


class CorrectionSettings(Settings):
    """Importance weights for what engine and trainer compute differently of the same weights; see trainer.correction.

    They weigh the policy's loss and have no gradient. A ratio against the engine's own log-probs has no use for them.
    """

    level: Literal["none", "token", "sequence"] = setting(
        "none", "whose probability is compared: each token's, or the whole answer's, which all its tokens then share")
    rule: Literal["truncate", "mask", "two_sided"] = setting(
        "truncate", "weights over cap become cap; or weigh nothing; or weigh nothing over cap and under floor (IcePop)")
    cap: float = setting(2.0, "largest weight that counts as it is (5.0 in IcePop)", gt=0.0)
    floor: float = setting(0.5, "smallest weight that counts, for the rule two_sided", ge=0.0)

    @model_validator(mode="after")
    def _in_order(self) -> CorrectionSettings:
        if self.floor >= self.cap:
            raise ValueError(f"policy.grpo.correction.floor = {self.floor} is not under policy.grpo.correction.cap = "
                             f"{self.cap}: every token would be cut")
        return self


class GrpoSettings(Settings):
    """Group relative policy optimisation (Shao et al. 2024, equations 3 and 4)."""

    clip_low: float = setting(0.2, "the ratio counts down to 1 - this", ge=0.0, lt=1.0)
    clip_high: float = setting(0.2, "the ratio counts up to 1 + this; DAPO raises it to 0.28", ge=0.0)
    dual_clip: float = setting(0.0, "bound on the loss of bad samples (3.0 in the literature); 0 sets none", ge=0.0)
    kl_coefficient: float = setting(0.0, "weight of the distance to the reference; 0 needs no reference", ge=0.0)
    kl_estimator: KlEstimator = setting("k3", "how that distance is estimated from samples")
    entropy_coefficient: float = setting(
        0.0, "weight of the policy's entropy, which is raised: keeps small models trying other answers", ge=0.0
    )
    aggregation: Aggregation = setting("token-mean", "how token losses become one number, by counts of the whole batch")
    aggregation_length: int = setting(1024, "divisor of seq-mean-token-sum-norm", unit="tokens", ge=1)
    advantage_epsilon: float = setting(1e-6, "added to the group's standard deviation", gt=0.0)
    normalise_std: bool = setting(True, "divide by the group's standard deviation; false is Dr. GRPO")
    old_logprobs: Literal["behaviour", "recomputed"] = setting(
        "behaviour", "log-probs of the ratio's denominator: the engine's, or the trainer's own before the first update"
    )
    mini_batches: int = setting(1, "updates made from one batch, each on its share of the groups", ge=1)
    correction: CorrectionSettings = setting(
        CorrectionSettings, "weights for the mismatch of engine and trainer, where old_logprobs = \"recomputed\"")

    @model_validator(mode="after")
    def _correction_has_both_sides(self) -> GrpoSettings:
        if self.correction.level != "none" and self.old_logprobs != "recomputed":
            raise ValueError(f"policy.grpo.correction.level = \"{self.correction.level}\" needs "
                             "policy.grpo.old_logprobs = \"recomputed\": with \"behaviour\" the ratio itself is "
                             "against the engine")
        return self

    @property
    def ties_teach(self) -> bool:
        """Whether a group whose rewards are all equal has a gradient."""
        return self.kl_coefficient > 0 or self.entropy_coefficient > 0


class LoraSettings(Settings):
    """An adapter in the place of the whole model; see trainer.adapter. Dropout is 0: engines have none."""

    rank: int = setting(0, "rank of the adapter that is trained on a frozen base; 0 = the whole model is", ge=0)
    alpha: float = setting(32.0, "the adapter counts alpha / rank times", gt=0.0)
    targets: tuple[str, ...] = setting(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "linear layers that have an adapter, by the last part of their name", strict=False, min_length=1)
    publish: Literal["adapter", "merged"] = setting(
        "adapter", "what engines receive: the adapter alone, for a base that they load themselves, or base and adapter "
        "as one model, which every engine can take")


class TrainerSettings(Settings):
    """A policy and how it is updated."""

    model: str = setting("tiny:qwen3", "a Hugging Face causal-LM directory, or tiny:qwen3?hidden=128&layers=4")
    seed: int = setting(0, "initial weights of a tiny model and of an adapter", ge=0, le=(1 << 63) - 1)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "arithmetic of the forward pass; weights stay float32")
    publish_dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "what engines receive and hold; float16 is eight times as fine as bfloat16 from 6e-5 to 65504")
    device: str = setting("auto", "cpu, cuda, or auto for a GPU where there is one")
    ranks: int = setting(1, "processes that share the model through FSDP2", ge=1)
    threads: int = setting(1, "threads of one rank; sums depend on it, so it is fixed", ge=1, resumable=False)
    micro_batch_tokens: int = setting(
        16384, "padded tokens of one forward pass: memory, never the loss, depends on it", ge=1, resumable=True
    )
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, a third more time")
    command_deadline_s: float = setting(
        86400.0, "how long a follower rank waits for the leader's next command", unit="s", gt=0.0, resumable=True
    )
    collective_deadline_s: float = setting(
        600.0, "how long a rank waits for the others inside a step", unit="s", gt=0.0, resumable=True
    )
    lora: LoraSettings = setting(LoraSettings, "an adapter in the place of the whole model")
    optimizer: OptimizerSettings = setting(OptimizerSettings, "AdamW")
    sft: SftSettings = setting(SftSettings, "supervised steps")
    grpo: GrpoSettings = setting(GrpoSettings, "policy updates")
