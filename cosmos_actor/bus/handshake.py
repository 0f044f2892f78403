"""Who may talk to whom. Pure: two introductions in, a reason for a no out.

    dialler  --HELLO-->    listener    (nothing else of this wire is looked at before)
    dialler  <--WELCOME--  listener    both may send now; or
    dialler  <--REFUSED--  listener    with one line that says why
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from .codec import Decoding
from .envelope import PROTOCOL
from .errors import CorruptFrame
from .identity import Identity
from .limits import Limits
from .schema import Json, codec_of, schema, schema_skew, to_plain

KEY_NOT_LISTED = "key not on the list"
WRONG_SERVER_KEY = "wrong server key"
NO_CURVE = "no CURVE"
"""How a transport's refusals begin that say which key was wrong, or that there is none."""


@schema("cosmos_actor.introduction", version=1)
class Introduction:
    """What one side says about itself in HELLO and WELCOME: identity, what it understands, what it grants."""

    run_id: str
    role: str
    actor: str
    incarnation: str
    host_id: str
    session: str
    """Named by the dialler; numbers of messages start anew with a new one, and go on with the same one."""
    wanted_role: str
    """Empty in a WELCOME."""
    wanted_actor: str
    """Empty: any actor of the role."""
    schemas: Dict[str, Tuple[int, int]]
    max_message_bytes: int
    work_window_messages: int
    work_window_bytes: int
    call_window_messages: int
    event_window_messages: int
    shared: Json
    """How to open this side's ring of shared memory, if it has one."""

    @property
    def identity(self) -> Identity:
        return Identity(self.run_id, self.role, self.actor, self.incarnation)


def introduce(
    identity: Identity, limits: Limits, schemas: Dict[str, Tuple[int, int]], host_id: str, session: str,
    wanted_role: str = "", wanted_actor: str = "", shared: Any = None,
) -> Introduction:
    return Introduction(
        identity.run_id, identity.role, identity.actor, identity.incarnation, host_id, session, wanted_role,
        wanted_actor, schemas, limits.max_message_bytes, limits.work_window_messages, limits.work_window_bytes,
        limits.call_window_messages, limits.event_window_messages, shared,
    )


def to_payload(introduction: Introduction) -> Any:
    return to_plain(introduction)[1]


def from_payload(payload: Any) -> Introduction:
    """Raises CorruptFrame for a payload that is no introduction."""
    try:
        made = codec_of(Introduction).decode(payload, Decoding(()))
        made.identity  # noqa: B018  (its own checks)
        if min(made.max_message_bytes, made.work_window_messages, made.work_window_bytes, made.call_window_messages,
               made.event_window_messages) <= 0:
            raise ValueError("it grants nothing")
    except Exception as error:
        # Whatever a stranger sends ends here, as one kind of error.
        raise CorruptFrame(f"an introduction that is none: {error}") from None
    assert isinstance(made, Introduction)
    return made


def said(payload: Any, otherwise: str) -> str:
    """The one line of REFUSED or GOODBYE, or `otherwise` where there is none."""
    return payload[0] if type(payload) is list and payload and type(payload[0]) is str else otherwise


def judge_protocol(protocol: int) -> Optional[str]:
    """Reason to refuse, or None."""
    if protocol == PROTOCOL:
        return None
    return f"protocol version: we speak {PROTOCOL}, the peer {protocol}; install the same cosmos-actor on both sides"


def judge(ours: Introduction, theirs: Introduction, key_role: Optional[str]) -> Optional[str]:
    """Reason to refuse the peer, or None. `key_role`: the role its key belongs to, None where there are no keys."""
    if theirs.run_id != ours.run_id:
        return f"other run: we are {ours.run_id}, the peer is {theirs.run_id}"
    if key_role is not None and key_role != theirs.role:
        return f"role not the key's: the peer says {theirs.role}, its key belongs to {key_role}"
    if theirs.wanted_role and theirs.wanted_role != ours.role:
        return f"role: the peer wants {theirs.wanted_role}, here is {ours.role}"
    if theirs.wanted_actor and theirs.wanted_actor != ours.actor:
        return f"actor: the peer wants {theirs.wanted_actor}, here is {ours.actor}"
    if (theirs.actor, theirs.incarnation) == (ours.actor, ours.incarnation):
        return f"the peer is {ours.actor} itself"
    skew = schema_skew(ours.schemas, theirs.schemas)
    return None if skew is None else f"schema skew: {skew}"


def judge_welcome(ours: Introduction, theirs: Introduction) -> Optional[str]:
    """The dialler's look at who answered; reason to turn away, or None."""
    if theirs.session != ours.session:
        return "the answer belongs to another session"
    if ours.wanted_role and theirs.role != ours.wanted_role:
        return f"role: we want {ours.wanted_role}, there is {theirs.role}"
    if ours.wanted_actor and theirs.actor != ours.wanted_actor:
        return f"actor: we want {ours.wanted_actor}, there is {theirs.actor}"
    return judge(ours, theirs, None)
