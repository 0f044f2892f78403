from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.bus import CorruptFrame, Identity, Limits
from cosmos_actor.bus.handshake import (
    Introduction,
    from_payload,
    introduce,
    judge,
    judge_protocol,
    judge_welcome,
    to_payload,
)
from cosmos_actor.bus.schema import pack, unpack

OURS = introduce(Identity("run", "rollout", "rollout-0", "life-1"), Limits(), {"m": (1, 7)}, "host", "s1")
THEIRS = introduce(
    Identity("run", "controller", "controller-0", "life-2"), Limits(), {"m": (1, 7), "n": (3, 3)}, "host", "s1",
    "rollout", "rollout-0",
)


def changed(**fields: object) -> Introduction:
    return dataclasses.replace(THEIRS, **fields)  # type: ignore[arg-type]


def test_a_fitting_peer_passes() -> None:
    assert judge(OURS, THEIRS, None) is None
    assert judge(OURS, THEIRS, "controller") is None
    assert judge_welcome(THEIRS, OURS) is None


@pytest.mark.parametrize(
    ("theirs", "key_role", "reason"),
    [
        (changed(run_id="other"), None, "other run: we are run, the peer is other"),
        (THEIRS, "policy", "role not the key's: the peer says controller, its key belongs to policy"),
        (changed(wanted_role="policy"), None, "role: the peer wants policy, here is rollout"),
        (changed(wanted_actor="rollout-1"), None, "actor: the peer wants rollout-1, here is rollout-0"),
        (changed(actor="rollout-0", incarnation="life-1"), None, "the peer is rollout-0 itself"),
        (changed(schemas={"m": (2, 7)}), None, "schema skew: schema m: we have version 1, the peer version 2"),
        (changed(schemas={"m": (1, 8)}), None, "schema skew: schema m version 1: the peer declares other fields"),
    ],
)
def test_who_does_not_fit_is_told_why(theirs: Introduction, key_role: str | None, reason: str) -> None:
    assert str(judge(OURS, theirs, key_role)).startswith(reason)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("session", "s2", "another session"), ("role", "policy", "we want rollout"), ("actor", "x", "we want rollout-0")],
)
def test_the_dialler_looks_at_who_answers(field: str, value: str, reason: str) -> None:
    assert reason in str(judge_welcome(THEIRS, dataclasses.replace(OURS, **{field: value})))


def test_a_schema_that_only_one_side_knows_is_no_skew() -> None:
    assert judge(OURS, changed(schemas={"other": (9, 9)}), None) is None


def test_protocols() -> None:
    assert judge_protocol(1) is None
    assert "we speak 1, the peer 2" in str(judge_protocol(2))


def test_introductions_survive_the_wire() -> None:
    assert from_payload(unpack(pack(to_payload(THEIRS)))) == THEIRS


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=16)))
def test_whatever_a_stranger_sends_is_a_corrupt_frame(payload: object) -> None:
    with pytest.raises(CorruptFrame):
        from_payload(payload)


@pytest.mark.parametrize("field", ["max_message_bytes", "work_window_messages", "event_window_messages"])
def test_an_introduction_that_grants_nothing_is_corrupt(field: str) -> None:
    for value in (0, -1):
        with pytest.raises(CorruptFrame, match="grants nothing"):
            from_payload(unpack(pack(to_payload(changed(**{field: value})))))


def test_an_introduction_without_a_name_is_corrupt() -> None:
    with pytest.raises(CorruptFrame, match="actor must be a text"):
        from_payload(unpack(pack(to_payload(changed(actor="")))))
