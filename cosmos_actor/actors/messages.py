"""What actors and the head of a run say to each other about who is here and how they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cosmos_actor.bus.schema import Json, schema

MEMBERSHIP_TOPIC = "membership"
STATUS_TOPIC = "status"
PROCESSES_TOPIC = "processes"
DIALLING, STARTING, READY, LEAVING, FAILED = "dialling", "starting", "ready", "leaving", "failed"
"""States of an actor's life; see `ActorRuntime`."""


@schema("announce", version=1)
@dataclass(frozen=True)
class Announce:
    """An actor tells the head where others can dial it: right after its link to the head is up, whenever that is a new
    one. A head that was restarted learns from it who is here."""

    address: str
    pid: int
    python: str
    host: str
    joined: bool
    """True for an actor that someone started by hand (`start`), which the supervisor does not own."""


@schema("ask_settings", version=1)
@dataclass(frozen=True)
class AskSettings:
    """An actor's first question to the head."""


@schema("run_settings", version=1)
@dataclass(frozen=True)
class RunSettingsReply:
    """The run's resolved settings, so that an actor started by hand on another host needs no file but its key."""

    settings: Json
    seed: int


@schema("member", version=1)
@dataclass(frozen=True)
class Member:
    """One live actor, as the head sees it."""

    role: str
    actor: str
    incarnation: str
    address: str
    pid: int
    python: str
    host: str
    joined: bool
    ready: bool
    """Its setup is over, so it answers at once."""
    leaving: bool


@schema("membership", version=1)
@dataclass(frozen=True)
class Membership:
    """All live actors. `serial` only grows; `departed` gives the reason of each incarnation that went."""

    serial: int
    members: list[Member]
    departed: dict[str, str]


@schema("actor_status", version=1)
@dataclass(frozen=True)
class ActorStatus:
    """The heartbeat of an actor's working loop, once a second, latest value wins."""

    state: str
    progress: int
    busy_label: str
    busy_seconds: float
    weights_held: str
    statistics: Json = field(default_factory=dict)


@schema("leaving", version=1)
@dataclass(frozen=True)
class Leaving:
    """An actor wants to go: it gets no new work from now on, and goes when it has finished what it holds."""

    reason: str


@schema("stop_actor", version=1)
@dataclass(frozen=True)
class StopActor:
    """The head asks an actor that it does not own as a process to end."""

    reason: str


@schema("job_finished", version=1)
@dataclass(frozen=True)
class JobFinished:
    """The controller's last word to the head."""

    outcome: str
    reason: str
    exit_code: int


@schema("processes", version=1)
@dataclass(frozen=True)
class Processes:
    """What the supervisor knows and the head has to: its children, and how lives of them ended. Latest value wins."""

    children: Json
    """As `Supervisor.children` gives them."""
    exited: dict[str, str]
    """Incarnation -> reason, of the latest ends."""
    run_over: str
    """Why the run is over, as joined actors are told when the head ends; empty while it goes on."""


@schema("heard", version=1)
@dataclass(frozen=True)
class Heard:
    """The head has heard of a life: it announced itself, or gave its status."""

    actor: str
    incarnation: str
    state: str
    progress: str
    busy_s: float
    """How long it has asked to be left alone."""


@schema("kill_order", version=1)
@dataclass(frozen=True)
class KillOrder:
    """An actor is stuck, and the settings say that it is to be killed."""

    actor: str
    incarnation: str
    reason: str


@schema("dump_stacks", version=1)
@dataclass(frozen=True)
class DumpStacks:
    """At a standstill: write your own stacks, under this title."""

    title: str


@schema("stacks_dumped", version=1)
@dataclass(frozen=True)
class StacksDumped:
    """Whether they are written."""

    written: bool


@schema("warning", version=1)
@dataclass(frozen=True)
class Warned:
    """A warning of the head's own process, for whoever watches the run."""

    text: str


@schema("ask_mute", version=1)
@dataclass(frozen=True)
class AskMute:
    """Is there a role none of whose actors has been heard of for so long?"""

    seconds: float


@schema("mute_role", version=1)
@dataclass(frozen=True)
class MuteRole:
    """The role, or empty."""

    role: str


@schema("ask_time", version=1)
@dataclass(frozen=True)
class AskTime:
    """What does your clock say?"""


@schema("time_reply", version=1)
@dataclass(frozen=True)
class TimeReply:
    """Seconds after 1970, as the asked process reads them."""

    wall_s: float


@schema("ask_links", version=1)
@dataclass(frozen=True)
class AskLinks:
    """Whom are you linked with, and how is it?"""


@schema("link_report", version=1)
@dataclass(frozen=True)
class LinkReport:
    """One link as one of its ends sees it."""

    actor: str
    role: str
    incarnation: str
    up: bool
    wires: int
    """Wires used so far; each above one was a reconnection."""
    silent_s: float
    busy: str
    """What for the peer asked to be left alone; empty: it did not."""
    under_way: int
    """Messages of the reporting end that the peer is not done with."""
    credit_messages: int
    credit_bytes: int
    """Work that the peer would still take."""
    lane: bool
    """Messages may go past the socket: the two are processes of one host."""
    lane_messages: int
    ring_arrays: int


@schema("links_report", version=1)
@dataclass(frozen=True)
class LinksReport:
    """All links but the one over which it was asked."""

    links: list[LinkReport]


def plain(member: Member) -> dict[str, Any]:
    """A member as plain JSON, for status files."""
    return dict(vars(member))
