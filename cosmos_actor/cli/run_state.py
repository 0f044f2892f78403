"""The state of a run, read from its directory by any process; what lives is asked from the kernel."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from cosmos_actor import death
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.cli.report import read_balance
from cosmos_actor.cli.run_view import ActorView, RunView

STATUS = "status.json"
START_TOLERANCE_S = 5.0
"""A process that began farther from its `started` event is another one that got the same number."""


def read_run(paths: RunPaths) -> RunView:
    view = RunView()
    view.add_metrics(read_json_lines(paths.metrics, skip_damaged=True))
    view.add_events(read_json_lines(paths.events, skip_damaged=True))
    return view


def read_status(paths: RunPaths) -> dict[str, Any]:
    """What the head last wrote about itself and its members; empty before it did."""
    try:
        status = json.loads((paths.root / STATUS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def run_state(paths: RunPaths) -> dict[str, Any]:
    """All that `status --json` prints."""
    view, status, owner = read_run(paths), read_status(paths), paths.owner_pid()
    members = {member["actor"]: member for member in status.get("members", [])} if owner else {}
    actors = [actor_state(actor, members.get(actor.actor, {}), running=owner is not None)
              for actor in view.actors.values()]
    published = published_weights(list(members.values()))
    for actor in actors:
        actor["weights"] = weights_of(members.get(actor["actor"], {}), published)
    return {
        "run_dir": str(paths.root), "run_id": paths.describe().get("run_id"), "running": owner is not None,
        "supervisor_pid": owner, "head": status.get("head") if owner else None,
        "step": int(view.last.get("step") or 0), "last_step": _last_step(paths.configuration),
        "phase": view.last.get("phase"), "version": view.last.get("version"), "published": published or None,
        "metrics": dict(view.last),
        "evaluations": [{"step": step, "accuracy": value} for step, value in view.evaluations],
        "rewinds": view.rewinds, "restarts": view.restarts, "actors": actors,
        "processes": sum(actor["alive"] for actor in actors) + (owner is not None), "ledger": read_balance(paths),
    }


def actor_state(actor: ActorView, member: dict[str, Any], *, running: bool) -> dict[str, Any]:
    """One row. The kernel has the last word on a process of this host; the head, on one of another host."""
    remote = bool(actor.host) and actor.host != socket.gethostname()
    alive = bool(member) if remote else is_alive(actor.pid, actor.started, actor.incarnation)
    ended = "lost" if actor.state in ("ready", "starting") else actor.state
    state = member.get("state", actor.state) if alive else ended
    return {
        "actor": actor.actor, "role": actor.role, "alive": alive, "state": state, "pid": actor.pid,
        "interpreter": actor.interpreter, "host": actor.host or None, "incarnation": actor.incarnation,
        "restarts": actor.restarts, "last_reason": actor.last_reason or None, "reasons": actor.reasons,
        "stuck": actor.stuck or None, "doing": member.get("busy_label") or None,
        "weights_held": member.get("weights_held") or None,
    }


def published_weights(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Version, digest and since when, as the policy says; empty before it has published."""
    said = (proof_in(member) for member in members if member.get("role") == "policy")
    return next((proof for proof in said if proof), {})


def weights_of(member: Mapping[str, Any], published: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an actor holds, as it last said: version, digest, since, and whether that version was published with that
    digest; None where the policy has not told of that version (yet, or any more)."""
    proof = proof_in(member)
    if not proof:
        return None
    proof.pop("recent", None)
    known = published.get("recent", {}).get(proof["version"])
    return {**proof, "as_published": None if known is None else known == proof["digest"]}


def proof_in(member: Mapping[str, Any]) -> dict[str, Any]:
    """Of a member of status.json."""
    return dict((member.get("statistics") or {}).get("weights") or {})


def is_alive(pid: int | None, started: float | None, incarnation: str = "") -> bool:
    """Whether process `pid` lives and is the one that was meant, not another with its number.

    It is, when it carries the mark of `incarnation`, or, without any mark, began at `started` (seconds after 1970).
    """
    if pid is None:
        return False
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and _is_meant(process, started, incarnation)
    except psutil.Error:
        return False


def _is_meant(process: psutil.Process, started: float | None, incarnation: str) -> bool:
    mark = process.environ().get(death.INCARNATION)
    if mark is not None and incarnation:
        return mark == incarnation
    return started is None or abs(process.create_time() - started) < START_TOLERANCE_S


def _last_step(configuration: Path) -> int | None:
    """SFT steps and updates together, read without checking the rest of the file."""
    from cosmos_actor.actors.errors import UserError
    from cosmos_actor.recipes.layers import parse_toml
    from cosmos_actor.recipes.resolved import read_text
    try:
        tree = parse_toml(read_text(configuration), str(configuration))
        return int(tree["policy"]["sft_steps"]) + int(tree["run"]["steps"])
    except (UserError, KeyError):
        return None
