"""Rollouts and rewards that join a running job and leave it again, all the time: `python -m tests.churn`."""
