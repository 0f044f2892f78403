"""What a supervisor is told about one child."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cosmos_actor.actors.restart_policy import Restart


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One child: its command and the rules of its life. All times in seconds."""

    actor: str
    role: str
    command: tuple[str, ...]
    # the first word is the interpreter or program, a path or a name on PATH
    env: Mapping[str, str] = field(default_factory=dict)
    # added to the supervisor's own environment
    stdin: Callable[[str], bytes] | None = None
    # incarnation -> what is on its standard input, which ends when it is to stop and when the supervisor is gone: for
    # a launcher, whose own end or SIGTERM what it started elsewhere would not hear of; None = /dev/null
    pass_fds: tuple[int, ...] = ()
    # descriptors of the supervisor's that the child inherits, under the same numbers
    restart: Restart = Restart.PERMANENT
    alone: bool = False
    # its death restarts nobody else and no other's death restarts it, whatever the strategy
    significant: bool = False
    # when it ends well, the job is finished (OTP's `any_significant`)
    after: tuple[str, ...] | None = None
    # at the first start: actors that must be ready before; None = all that were named earlier
    start_s: float = 120.0
    # from start to ready; a child that hangs while loading must not hold the job for ever
    shutdown_s: float = 10.0
    # from SIGTERM, or the end of its input, to SIGKILL
    heartbeat_s: float | None = None
    # longest silence of a ready child before it is taken for stuck; None = not watched

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError(f"{self.actor} has no command")
        if self.significant and self.restart is Restart.PERMANENT:
            raise ValueError(f"{self.actor} is significant, so it must be allowed to end: transient or temporary")
