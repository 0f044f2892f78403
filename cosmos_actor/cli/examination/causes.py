"""Every cause that `doctor` can name: its exit code, and what to do. docs/doctor.md is the same table for people.

Pure: the bus's own words for a refusal in, a cause out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cosmos_actor.bus import handshake

Mark = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Cause:
    """One answer to: why can I not connect?"""

    name: str
    exit_code: int
    cure: str
    setting: str = ""
    """What to change, by the name it has on the command line or in a recipe."""


@dataclass(frozen=True)
class Observation:
    """One line: what was looked at, how it is, and, unless it is well, what to do and which setting that is."""

    what: str
    mark: Mark
    value: str
    cure: str = ""
    setting: str = ""
    cause: Cause | None = None


UNRESOLVED = Cause("name does not resolve", 10, "check the spelling and the resolver, or give the IPv4 address",
                   "ADDRESS")
NO_ROUTE = Cause("no route", 11, "this host has no way to that network: check its routes, VPN or container network",
                 "ADDRESS")
CLOSED = Cause("port closed", 12, "the host is there and nobody listens: is the run up, and is this its port? "
               "`cosmos-actor status` shows the head's address", "bus.port")
FILTERED = Cause("filtered", 13, "nothing came back: open the port in the firewalls between, or the host is off",
                 "bus.host")
NOT_ZMTP = Cause("no ZMTP", 14, "another program listens there: take the head's address from `cosmos-actor status`",
                 "ADDRESS")
SILENT = Cause("silent", 15, "it takes connections and does not answer: its process is stopped, or it is no bus",
               "ADDRESS")
NO_CURVE = Cause("no CURVE", 16, "that ZeroMQ socket is not encrypted, so it is no head of a run", "ADDRESS")
SERVER_KEY = Cause("wrong server key", 17, "the key file is of another run than the head: take ROLE.key of the run "
                   "that listens there", "--key")
OTHER_ROLE = Cause("not the head", 18, "an actor of this run listens there, not its head: `cosmos-actor status` shows "
                   "the head's address", "ADDRESS")
NOT_LISTED = Cause("key not on the list", 19, "the head was started with other keys: copy keys/ROLE.key from its run "
                   "directory again", "--key")
KEY_ROLE = Cause("key not for this role", 20, "a key belongs to one role: take keys/ROLE.key of the role you want",
                 "--key")
OTHER_RUN = Cause("wrong run", 21, "the key file and the head belong to different runs", "--run")
SCHEMAS = Cause("schema skew", 22, "install the same cosmos-actor on both sides", "cosmos-actor version")
PROTOCOL = Cause("protocol version", 23, "install the same cosmos-actor on both sides", "cosmos-actor version")
STALE = Cause("stale incarnation", 24, "the run has given this life of the actor up: start the actor again", "--name")
NAME = Cause("name in use", 25, "a living actor of the run has this name: take another one", "--name")
STUCK = Cause("no handshake", 26, "ZeroMQ answers and the program behind it does not: it is stuck, see its log and "
              "`cosmos-actor status`", "supervisor.heartbeat_s")
REFUSED = Cause("refused", 27, "the line is the head's own reason", "--key")
SKEW = Cause("clock skew", 28, "let both hosts follow one time (chrony, systemd-timesyncd): logs and ledgers of the "
             "two do not line up", "NTP")

CAUSES = (UNRESOLVED, NO_ROUTE, CLOSED, FILTERED, NOT_ZMTP, SILENT, NO_CURVE, SERVER_KEY, OTHER_ROLE, NOT_LISTED,
          KEY_ROLE, OTHER_RUN, SCHEMAS, PROTOCOL, STALE, NAME, STUCK, REFUSED, SKEW)

_OF_REFUSAL = (
    (handshake.KEY_NOT_LISTED, NOT_LISTED), (handshake.WRONG_SERVER_KEY, SERVER_KEY), (handshake.NO_CURVE, NO_CURVE),
    ("other run", OTHER_RUN),
    ("role not the key's", KEY_ROLE), ("role:", OTHER_ROLE), ("actor:", OTHER_ROLE), ("schema skew", SCHEMAS),
    ("protocol version", PROTOCOL), ("stale incarnation", STALE), ("already linked", NAME),
    ("the run has an actor named", NAME),
)
"""How the bus's and the head's refusals begin."""


def of_refusal(reason: str) -> Cause:
    """The cause behind a handshake that ended with a no."""
    return next((cause for begin, cause in _OF_REFUSAL if reason.startswith(begin)), REFUSED)


def bad(what: str, cause: Cause, value: str) -> Observation:
    return Observation(what, "bad", f"{cause.name}: {value}", cause.cure, cause.setting, cause)


def exit_code(observations: list[Observation]) -> int:
    """Of the first cause that is bad, else of the first that is a warning; 1 for what is bad without a cause."""
    for mark in ("bad", "warn"):
        for seen in observations:
            if seen.mark == mark and seen.cause is not None:
                return seen.cause.exit_code
        if mark == "bad" and any(seen.mark == "bad" for seen in observations):
            return 1
    return 0
