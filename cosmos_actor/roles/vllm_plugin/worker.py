"""What a rollout's workers can be asked beside what vLLM's can: each of them imports it as its `worker_extension_cls`.

So the weight-transfer engine is known in each worker whether the entry point is installed or not.
"""

from __future__ import annotations

from typing import Any

from cosmos_actor.roles.vllm_plugin import register
from cosmos_actor.roles.vllm_plugin.lives import die_with_parent
from cosmos_actor.roles.vllm_plugin.names import forget_names, mark_communicators, mark_names
from cosmos_actor.weight_plane.reshard import Box

register()
die_with_parent()
mark_names()  # vLLM makes its queues and communicators after this
mark_communicators()


class Extension:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: Any

    def cosmos_boxes(self) -> dict[str, Box]:
        """See CosmosWeightTransferEngine.boxes."""
        return self.weight_transfer_engine.boxes()  # type: ignore[no-any-return]

    def cosmos_report(self) -> dict[str, Any]:
        """See CosmosWeightTransferEngine.report."""
        return self.weight_transfer_engine.report()  # type: ignore[no-any-return]

    def cosmos_read_back(self) -> dict[str, bytes]:
        """See CosmosWeightTransferEngine.read_back."""
        return self.weight_transfer_engine.read_back()  # type: ignore[no-any-return]

    def cosmos_forget_names(self) -> None:
        """See names.forget_names."""
        forget_names()
