"""vLLM's weight transfer, served by the weight plane: `WeightTransferConfig(backend="cosmos")`.

    rollout / trainer                      each worker of vLLM
    start_weight_update()                  nothing yet
    update_weights({manifest, ...})        pulls its part into memory of its own, verifies it; all workers, or none
    finish_weight_update(version)          loads it, reads back what its layers compute with, compares

`register` is the entry point of the group `vllm.general_plugins`; vLLM calls it in each of its processes.
"""

from __future__ import annotations

NAME = "cosmos"
"""Of the weight-transfer engine."""


def register() -> None:
    """Tell vLLM of it, once a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            NAME, "cosmos_actor.roles.vllm_plugin.transfer", "CosmosWeightTransferEngine")
    except ValueError:  # it is known already: vLLM may call this twice
        pass
