"""Names of roles that the parts of a run know each other by. Costs nothing to import."""

from __future__ import annotations

REGISTRY = "registry"
"""The process that is the head of a run."""
SUPERVISOR = "supervisor"
"""The process that owns the processes."""
