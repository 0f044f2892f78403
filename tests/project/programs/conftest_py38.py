"""tests/conftest.py for CPython 3.8: its fixtures, without the look for leaks, which needs newer parts."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def popen():
    """`subprocess.Popen` whose processes (with their sessions) are killed when the test ends."""
    started = []

    def start(command, **options):
        process = subprocess.Popen(command, start_new_session=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait(5.0)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
