"""Names of roles and actors that the parts of a run know each other by. Costs nothing to import."""

from __future__ import annotations

REGISTRY, REGISTRY_ACTOR = "registry", "registry-0"
"""The process that is the head of a run."""
SUPERVISOR, SUPERVISOR_ACTOR = "supervisor", "supervisor-0"
"""The process that owns the processes."""
