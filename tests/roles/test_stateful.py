"""A stateful role answers the life of the job that restored it last, and no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cosmos_actor.roles.messages import PutRequest, RestoreRequest, SampleRequest, SaveRequest
from cosmos_actor.roles.replay_buffer import ReplayBufferRole
from cosmos_actor.roles.stateful import AnotherLife
from tests.actors.groups import make_group


@pytest.fixture
def role():
    sections = {"replay_buffer": SimpleNamespace(budget_bytes=1 << 20), "run": SimpleNamespace(max_staleness=0)}
    made = ReplayBufferRole(SimpleNamespace(settings=SimpleNamespace(**sections)))
    made.setup()
    return made


def test_before_a_restore_nobody_is_answered(role):
    with pytest.raises(AnotherLife, match="asked by life 0 of the job, replay_buffer belongs to life -1"):
        role.put(PutRequest(0, 1, [make_group()]))


def test_a_request_that_a_restore_has_overtaken_is_refused(role, tmp_path):
    role.restore(RestoreRequest(None, 3, 0))
    role.put(PutRequest(3, 1, [make_group(1)]))
    role.restore(RestoreRequest(None, 4, 0))
    for late in (lambda: role.put(PutRequest(3, 1, [make_group(2)])), lambda: role.sample(SampleRequest(3, 1, 0)),
                 lambda: role.save(SaveRequest(str(tmp_path), 3, 0)), lambda: role.restore(RestoreRequest(None, 3, 0))):
        with pytest.raises(AnotherLife):
            late()
    assert len(role.buffer) == 0 and list(tmp_path.iterdir()) == []
    assert role.put(PutRequest(4, 1, [make_group(2)])).stored == 1
