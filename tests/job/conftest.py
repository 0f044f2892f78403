"""Fixtures of the tests that run whole jobs."""

from __future__ import annotations

import pytest

from tests.job.runs import Run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, module_popen) -> Run:
    """One job, run to its end as processes: what every other way of running it is compared with."""
    run = Run(tmp_path_factory.mktemp("uninterrupted"), module_popen)
    run.finish()
    return run


@pytest.fixture
def run(tmp_path, popen) -> Run:
    return Run(tmp_path, popen)
