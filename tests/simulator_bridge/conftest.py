from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator_bridge.driver import make_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Role -> key file."""
    return make_keys(tmp_path_factory.mktemp("keys"))
