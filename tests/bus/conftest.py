from __future__ import annotations

import pytest

from cosmos_actor.bus import KeyRing
from tests.bus.world import World, make_keys


@pytest.fixture(scope="session")
def run_keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KeyRing]:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(params=["memory", "zmq"])
def world(request: pytest.FixtureRequest, run_keys: dict[str, KeyRing]) -> World:
    """The same test on both transports."""
    return World(request.param, run_keys)


@pytest.fixture
def memory_world() -> World:
    return World("memory", {})


@pytest.fixture
def zmq_world(run_keys: dict[str, KeyRing]) -> World:
    return World("zmq", run_keys)
