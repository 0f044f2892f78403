"""What every bus of a run answers to whoever examines it: its clock, and whom it is linked with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cosmos_actor.actors.messages import AskLinks, AskTime, LinkReport, LinksReport, TimeReply
from cosmos_actor.bus import Bus, Link


def serve_examination(bus: Bus, wall: Callable[[], float]) -> None:
    """To be called before the bus starts. `wall` is the time that this process writes into its files."""

    def time_asked(message: AskTime, link: Link) -> TimeReply:
        return TimeReply(wall())

    def links_asked(message: AskLinks, link: Link) -> LinksReport:
        return LinksReport([report(one) for one in bus.links.values() if one is not link])

    bus.serve(AskTime, time_asked)
    bus.serve(AskLinks, links_asked)


def report(link: Link) -> LinkReport:
    """A link as its own end sees it, small enough for a thousand in one message."""
    seen = link.statistics()
    sending: dict[str, Any] = seen["sending"]
    credit = sending["credit"]["work"]
    return LinkReport(
        actor=link.actor, role=link.role, incarnation=link.peer.incarnation, up=seen["up"], wires=seen["wires"],
        silent_s=float(seen["liveness"]["silent_s"]), busy=str(seen["liveness"]["busy"]),
        under_way=sum(sending["under_way"].values()),
        credit_messages=credit["granted_messages"] - credit["used_messages"],
        credit_bytes=credit["granted_bytes"] - credit["used_bytes"], lane=link.sharing.has_lane,
        lane_messages=seen["shared"]["lane_messages"], ring_arrays=seen["shared"]["ring_arrays"])
