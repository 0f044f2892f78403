"""Post-training without Ray: roles are processes that exchange typed trajectories and versioned weights over ZeroMQ."""

__version__ = "0.1.0"
