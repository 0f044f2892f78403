"""`cosmos-actor weights verify`: every engine of a running job reads back what it holds; all are compared."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cosmos_actor.cli.arguments import JsonOption, RunArgument
from cosmos_actor.cli.screen import plain, table
from cosmos_actor.weight_plane.shown_digest import shown

if TYPE_CHECKING:
    from cosmos_actor.actors.run_directory import RunPaths
    from cosmos_actor.bus import Bus
    from cosmos_actor.roles.messages import WeightsProof

NAME, EXAMPLE = "weights", "cosmos-actor weights verify latest"
VERIFY = "verify"
PUBLISHER, ENGINES = "policy", "rollout"
DIAL_S = 5.0
"""An actor answers a knock in milliseconds. It is apart from the deadline: who can not be reached is named at once."""
AGAIN_S = 0.3
"""Until those are asked again that were just taking a newer version."""


@dataclass(frozen=True)
class Verdict:
    """What one actor holds now, and whether that is what was published."""

    actor: str
    role: str
    version: str
    digest: str
    """Of what is there now."""
    expected: str
    """Of what was taken, or published."""
    equal: bool
    why: str
    """Why it is not equal; empty when it is."""
    seconds: float
    answered: bool

    @property
    def passing(self) -> bool:
        """It holds, rightly, nothing yet or another version than the newest, which may be on its way."""
        return not self.equal and self.answered and self.digest == self.expected

    @property
    def word(self) -> str:
        """The verdict in the table: who holds nothing that could differ is not called unequal."""
        if self.equal:
            return "published" if self.role == PUBLISHER else "equal"
        if not self.answered:
            return "NO ANSWER"
        return "NOT EQUAL" if self.version else "NOTHING YET"


def command(
    what: Annotated[str, typer.Argument(metavar=VERIFY, help="What to do.")],
    run: RunArgument = "latest",
    deadline: Annotated[float, typer.Option(
        "--deadline", metavar="SECONDS", min=0.1, help="Whoever has not answered by then is named. An engine answers "
        "between two pieces of work.")] = 60.0,
    as_json: JsonOption = False,
) -> int:
    """Let every rollout compute the digest of what its engine holds now, and the policy that of what it published, and
    compare them. Exit code 0 when all are equal."""
    from cosmos_actor.actors.errors import BadValue
    from cosmos_actor.cli.runs import find_run
    if what != VERIFY:
        raise BadValue(f"there is no `weights {what}`; there is `weights {VERIFY}`", setting="WHAT")
    paths = find_run(run)
    verdicts = asyncio.run(verify(paths, deadline))
    engines = [verdict for verdict in verdicts if verdict.role == ENGINES]
    ok = bool(engines) and all(verdict.equal for verdict in verdicts)
    if as_json:
        rows = [asdict(verdict) for verdict in verdicts]
        typer.echo(json.dumps({"run_dir": str(paths.root), "ok": ok, "actors": rows}))
    else:
        _print(verdicts)
    if not engines:
        typer.echo("error: no rollout takes part in this run", err=True)
    for verdict in verdicts:
        if not verdict.equal:
            typer.echo(f"error: {verdict.actor}: {verdict.why}", err=True)
    return 0 if ok else 1


async def verify(paths: RunPaths, deadline_s: float) -> list[Verdict]:
    """What all hold. Those that have not come yet, hold nothing yet, or another version than the newest, are asked
    again until they do, or time is up. Raises StillStarting for a run in one process."""
    from cosmos_actor.cli.check_live import asking
    until, told = time.monotonic() + deadline_s, Told()
    while not (present := _present(paths)) and (missing := _wanted(paths)) and time.monotonic() + AGAIN_S < until:
        told.waiting_for(missing)
        await asyncio.sleep(AGAIN_S)
    if not present:
        return [_missing(actor, deadline_s) for actor in sorted(_wanted(paths))]
    async with asking(paths) as bus:
        while True:
            present = _present(paths) or present
            said = await asyncio.gather(*(
                _ask(bus, actor, *where, until, deadline_s) for actor, where in present.items()))
            found = compare({actor: (present[actor][0], answer)
                             for actor, answer in zip(present, said, strict=True)})
            missing = _wanted(paths) - present.keys()
            wrong = [verdict for verdict in found if not verdict.equal]
            late = time.monotonic() + AGAIN_S > until
            if late or not (wrong or missing) or not all(verdict.passing for verdict in wrong):
                return [*found, *(_missing(actor, deadline_s) for actor in sorted(missing))]
            told.waiting_for(missing)
            await asyncio.sleep(AGAIN_S)


class Told:
    """Who is waited for, said once for each who."""

    def __init__(self) -> None:
        self._last: set[str] = set()

    def waiting_for(self, missing: set[str]) -> None:
        if missing and missing != self._last:
            typer.echo(f"waiting for {', '.join(sorted(missing))} to come", err=True)
        self._last = missing


def _present(paths: RunPaths) -> dict[str, tuple[str, str]]:
    """Policy and rollouts that are there -> role and address. Empty while the run is still starting."""
    from cosmos_actor.cli.check_live import StillStarting, whom_to_ask
    try:
        asked = whom_to_ask(paths, "RUN")
    except StillStarting:
        if not _wanted(paths) or _in_one_process(paths):
            raise
        return {}
    return {actor: where for actor, where in asked.items() if where[0] in (PUBLISHER, ENGINES)}


def _wanted(paths: RunPaths) -> set[str]:
    """Policy and rollouts that the run itself keeps alive, as far as its directory says already."""
    from cosmos_actor.cli.check_live import planned
    if not paths.configuration.exists():
        return set()
    return {actor for actor in planned(paths) if actor.rpartition("-")[0] in (PUBLISHER, ENGINES)}


def _in_one_process(paths: RunPaths) -> bool:
    """It has done a step, and started no process."""
    from cosmos_actor.actors.json_lines import read_json_lines
    events = read_json_lines(paths.events, skip_damaged=True)
    return bool(read_json_lines(paths.metrics, skip_damaged=True)) and not any(
        event.get("event") == "started" for event in events)


def _missing(actor: str, deadline_s: float) -> Verdict:
    why = f"has not come within {deadline_s:g} s (see `cosmos-actor status`); it may need a longer --deadline"
    return Verdict(actor, actor.rpartition("-")[0], "", "", "", False, why, 0.0, False)


async def _ask(bus: Bus, actor: str, role: str, address: str, until: float, deadline_s: float) -> WeightsProof | str:
    """The proof, or one line about why there is none."""
    from cosmos_actor.bus import BusError, DeadlineExceeded
    from cosmos_actor.roles.messages import AskWeights
    try:
        link = bus.links.get(actor) or await bus.connect(address, role=role, actor=actor, deadline_s=DIAL_S)
    except BusError as error:
        return f"can not be reached at {address}: {error.text}"
    try:
        return await link.call(AskWeights(), deadline_s=max(0.01, until - time.monotonic()))  # type: ignore[no-any-return]
    except DeadlineExceeded:
        return (f"did not answer within {deadline_s:g} s; it may be computing (see `cosmos-actor why`), or needs a "
                "longer --deadline")
    except BusError as error:
        return error.text


def compare(said: dict[str, tuple[str, WeightsProof | str]]) -> list[Verdict]:
    """One verdict an actor, the policy first. `said`: actor -> its role and its proof, or why it gave none."""
    proofs = [proof for role, proof in said.values() if role == PUBLISHER and not isinstance(proof, str)]
    published = proofs[0] if proofs else None
    order = sorted(said, key=lambda actor: (said[actor][0] != PUBLISHER, actor))
    return [_verdict(actor, *said[actor], published) for actor in order]


def _verdict(actor: str, role: str, proof: WeightsProof | str, published: WeightsProof | None) -> Verdict:
    if isinstance(proof, str):
        return Verdict(actor, role, "", "", "", False, proof, 0.0, False)
    why = _difference(role, proof, published)
    return Verdict(actor, role, proof.version, proof.digest, proof.expected, not why, why, proof.seconds, True)


def _difference(role: str, proof: WeightsProof, published: WeightsProof | None) -> str:
    """Why this is not what was published, or empty."""
    if not proof.version:
        return "has published nothing yet" if role == PUBLISHER else "holds no weights yet"
    if proof.digest != proof.expected:
        found = shown(proof.digest, "nothing")
        return (f"published {proof.version} as {shown(proof.expected)}, and what others pull now is {found}"
                if role == PUBLISHER else
                f"took {proof.version} as {shown(proof.expected)}, and its engine now holds {found}")
    if published is None or not published.version:
        return "there is nothing published to compare it with"
    if proof.version != published.version:
        return f"holds {proof.version}, published is {published.version}"
    if proof.digest != published.expected:
        return f"holds {proof.version} as {shown(proof.digest)}, published was {shown(published.expected)}"
    return ""


def _print(verdicts: list[Verdict]) -> None:
    from rich.console import Console

    made = table("actor", "weights", "digest now", "", "read in")
    for verdict in verdicts:
        cells: tuple[Any, ...] = (
            verdict.actor, verdict.version or "–", shown(verdict.digest, "–"), verdict.word,
            f"{verdict.seconds:.2f} s" if verdict.version else "–")
        made.add_row(*map(plain, cells))
    Console(highlight=False).print(made)
