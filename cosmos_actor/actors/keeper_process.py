"""The supervisor's side of its keeper: starting it, telling it of leaders, seeing that it lives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cosmos_actor import death
from cosmos_actor.actors import keeper

END_LIMIT_S = 2.0
"""How long a keeper that has done its work may take to end."""


class KeeperProcess:
    """Guarantee: while it is held, a keeper runs that knows every leader told of; a killed one is replaced at once."""

    def __init__(self, supervisor: str, events: Path, *, on_replaced: Callable[[], None] = lambda: None) -> None:
        self._command = (sys.executable, "-I", "-S", keeper.__file__, f"{death.SUPERVISOR}={supervisor}", str(events))
        self._on_replaced = on_replaced
        self._leaders: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def born(self, leader: int) -> None:
        self._leaders.add(leader)
        self._tell(f"+{leader}")

    def gone(self, leader: int) -> None:
        self._leaders.discard(leader)
        self._tell(f"-{leader}")

    async def dismiss(self) -> None:
        """Nothing is left to look after."""
        self._tell("done")
        self._let_go()
        await asyncio.to_thread(self._wait)

    def execute(self) -> None:
        """Have it do now what it would do after the supervisor's death: kill all. Returns when that is done."""
        self._let_go()
        self._wait()

    def _start(self) -> None:
        marks = (death.SUPERVISOR, death.INCARNATION)  # of a supervisor above this one: they must not kill the keeper
        environment = {name: value for name, value in os.environ.items() if name not in marks}
        self._popen = subprocess.Popen(self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0, cwd="/")
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        for leader in self._leaders:
            self._tell(f"+{leader}")

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            pass  # it was killed; its replacement is told of all leaders

    def _ended(self) -> None:
        self._let_go()
        self._popen.wait()
        self._start()
        self._on_replaced()

    def _let_go(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def _wait(self) -> None:
        try:
            self._popen.wait(keeper.KILL_LIMIT_S + END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
