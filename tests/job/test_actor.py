"""A joined actor says when the job can use it, or who has not come to it; a key of another run names the flag."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

import cosmos_actor.job.actor as job_actor
from cosmos_actor.actors.errors import UserError
from cosmos_actor.actors.messages import READY, STARTING
from cosmos_actor.bus import PeerRefused


def runtime(state: str, *peers: str) -> SimpleNamespace:
    links = {f"{role}-0": SimpleNamespace(peer=SimpleNamespace(role=role)) for role in peers}
    identity = SimpleNamespace(actor="rollout-far", run_id="run-1")
    return SimpleNamespace(state=state, bus=SimpleNamespace(links=links, identity=identity, address="tcp://h:1"))


def told(played: SimpleNamespace, within_s: float = 0.3) -> bool:
    """Whether the word is out within that time."""
    async def wait() -> bool:
        telling = asyncio.ensure_future(job_actor._tell_when_joined(played))
        done, _ = await asyncio.wait([telling], timeout=within_s)
        telling.cancel()
        return bool(done)

    return asyncio.run(wait())


def test_the_word_comes_when_both_are_true(capsys):
    assert not told(runtime(STARTING, "registry", "controller")) and not told(runtime(READY, "registry"))
    assert capsys.readouterr().err == ""
    assert told(runtime(READY, "registry", "controller"), within_s=10.0)
    assert capsys.readouterr().err == "rollout-far: joined run-1, ready for work\n"


def test_a_controller_that_does_not_come_is_said_once_with_the_address_and_the_flag(monkeypatch, capsys):
    monkeypatch.setattr(job_actor, "LINKED_WITHIN_S", 0.0)
    monkeypatch.setattr(job_actor, "LOOK_S", 0.01)
    assert not told(runtime(READY, "registry"))
    [line] = capsys.readouterr().err.splitlines()
    assert "no controller has come to tcp://h:1" in line and "--host" in line


@pytest.mark.parametrize("reason", ["key not on the list: the listener does not know our key",
                                    "wrong server key: the listener does not hold the key"])
def test_a_key_of_another_run_names_the_flag(monkeypatch, reason):
    def refuse(*arguments):
        raise PeerRefused(reason)

    monkeypatch.setattr(job_actor, "ask_settings", refuse)
    with pytest.raises(UserError, match=r"my\.key is not of the run behind tcp://h:1: .*--key"):
        job_actor._of_head(None, None, "tcp://h:1", "my.key")


def test_another_refusal_is_not_the_keys_fault(monkeypatch):
    def refuse(*arguments):
        raise PeerRefused("schema skew: x")

    monkeypatch.setattr(job_actor, "ask_settings", refuse)
    with pytest.raises(PeerRefused, match="schema skew"):
        job_actor._of_head(None, None, "tcp://h:1", "my.key")
