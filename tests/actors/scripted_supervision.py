"""A supervision with a pretended world: it carries out what is decided and lets a test say what happens next."""

from __future__ import annotations

from typing import Any

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.decisions import Abandon, Decision, Kill, Restarting, Start, Terminate
from cosmos_actor.actors.restart_policy import Outcome, Restart, RestartLimits, Strategy
from cosmos_actor.actors.supervision import Supervision


def child(actor: str, **fields: Any) -> ChildSpec:
    usual = {"role": "role", "command": ("true",), "start_s": 30.0, "shutdown_s": 5.0}
    return ChildSpec(actor=actor, **{**usual, **fields})


class World:
    """Time, the pretended processes, and everything that was decided, in order."""

    def __init__(self, *specs: ChildSpec, strategy: Strategy = Strategy.ONE_FOR_ONE, **limits: Any) -> None:
        self.now = 0.0
        self.core = Supervision(specs, strategy=strategy, limits=RestartLimits(**limits))
        self.alive: dict[str, int] = {}
        self.decided: list[Decision] = []

    def start(self, *, ready: bool = True) -> World:
        self.take(self.core.start(self.now))
        while ready and (starting := [actor for actor in self.alive if self.state(actor) == "starting"]):
            self.ready(starting[0])
        self.decided.clear()
        return self

    def ready(self, actor: str) -> None:
        self.take(self.core.ready(actor, self.alive[actor], self.now))

    def ends(self, actor: str, outcome: Outcome = Outcome.ABNORMAL, reason: str = "killed by SIGKILL") -> None:
        self.take(self.core.exited(actor, self.alive.pop(actor), outcome, reason, self.now))

    def stops(self, actor: str) -> None:
        self.ends(actor, Outcome.SHUTDOWN, "stopped")

    def stop(self, reason: str = "enough") -> None:
        self.take(self.core.stop(reason, self.now))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.tick(self.now))

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Start):
                assert decision.actor not in self.alive, f"two lives of {decision.actor} at once"
                self.alive[decision.actor] = decision.incarnation
            elif isinstance(decision, Abandon):
                self.alive.pop(decision.actor)
        self.decided += decisions

    def state(self, actor: str) -> str:
        return self.core.children[actor].state.value

    def took(self) -> list[str]:
        """What was decided since the last look, in short."""
        decided, self.decided = self.decided, []
        return [_short(decision) for decision in decided]


def _short(decision: Decision) -> str:
    match decision:
        case Start(actor, _):
            return f"start {actor}"
        case Terminate(actor):
            return f"terminate {actor}"
        case Kill(actor, reason):
            return f"kill {actor}: {reason}"
        case Restarting(actor, delay_s, _):
            return f"restarting {actor} in {delay_s:g}"
        case Abandon(actor):
            return f"abandon {actor}"
        case _:
            return f"{type(decision).__name__.lower()} {decision.end.kind.value}: {decision.end.reason}"


TEMPORARY, TRANSIENT, PERMANENT = Restart.TEMPORARY, Restart.TRANSIENT, Restart.PERMANENT
