"""One life of a child as processes: the leader, which the supervisor starts, and all that the leader starts."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from cosmos_actor import death
from cosmos_actor.actors import keeper
from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.exit_reason import ExitReason, explain

LOG_TAIL_BYTES = 16 * 1024
"""How much of a log is searched for the error.

A traceback under a flood of later warnings is farther up than one line.
"""
CHILD_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",  # a killed process's last words are in its log
    "PYTHONFAULTHANDLER": "1",  # and the stack of a crash
    "SPT_NOENV": "1",  # setproctitle would overwrite the environment by which the keeper knows its own
}


class DeathPipe:
    """A pipe that nobody writes to: its read end hangs up when the process that made it is gone.

    The write end is not inherited, so only this process holds it.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self.supervisor = death.describe(os.getpid(), secrets.token_hex(8))

    def environment(self) -> dict[str, str]:
        return {death.SUPERVISOR: self.supervisor, death.DEATH_FD: f"{self.read_fd}:{os.fstat(self.read_fd).st_ino}"}

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


class OpenInput:
    """Standard input for one process: it has `text`, and ends when this object is closed or this process is gone."""

    def __init__(self, text: bytes) -> None:
        """Raises OSError when a pipe has no room for the text."""
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)  # whoever writes has other children to look after
        if os.write(self._write_fd, text) < len(text):
            self.close()
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG), "standard input")

    def close(self) -> None:
        """A second time changes nothing."""
        if self._write_fd >= 0:
            os.close(self.read_fd)
            os.close(self._write_fd)
            self._write_fd = -1


class ChildProcess:
    """Guarantee: `on_end` is called once, from the loop, when the leader has ended; its process group is dead by then.

    `bury` afterwards ends what had left the group, and takes away what was left in /dev/shm. Output and errors go to
    `log`. Standard input is /dev/null, or what the spec says.
    """

    def __init__(self, spec: ChildSpec, incarnation: str, *, pipe: DeathPipe, log: Path,
                 on_end: Callable[[ChildProcess], None]) -> None:
        """Start it. Raises OSError when the operating system refuses. To be called on the loop's thread."""
        self.spec = spec
        self.incarnation = incarnation
        self.log = log
        self._on_end = on_end
        self._memory = keeper.memory_prefix(pipe.supervisor, incarnation)
        self._input = None if spec.stdin is None else OpenInput(spec.stdin(incarnation))
        try:
            self._popen = _start(spec, incarnation, pipe, log, self._input)
        except OSError:
            self._close_input()
            raise
        self.pid = self._popen.pid
        self._group = {self.pid}
        """And who was there when the leader ended."""
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._leader_ended)

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def terminate(self) -> None:
        """Ask the leader to stop; it looks after what it started."""
        if self._input is None:
            self._signal(os.kill, signal.SIGTERM)
        self._close_input()

    def kill(self) -> None:
        self._signal(os.killpg, signal.SIGKILL)

    def abandon(self) -> None:
        """Wait for it no more."""
        self._close_input()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def bury(self) -> set[int]:
        """End whatever of this life is left, in whatever session, and its files in /dev/shm; the pids it was."""
        killed = await asyncio.to_thread(keeper.kill_all, f"{death.INCARNATION}={self.incarnation}")
        await asyncio.to_thread(
            lambda: keeper.remove_memory(self._memory, *keeper.torch_prefixes({*self._group, *killed})))
        return killed

    def explain(self, *, asked: bool, killed_because: str | None, out_of_memory: bool) -> ExitReason:
        assert self.returncode is not None, f"{self.spec.actor} runs"
        return explain(self.returncode, asked=asked, killed_because=killed_because, out_of_memory=out_of_memory,
                       log_tail=log_tail(self.log))

    def _signal(self, send: Callable[[int, int], None], number: int) -> None:
        if self.returncode is None:  # so its number still is its own: nobody else reaps it
            try:
                send(self.pid, number)
            except ProcessLookupError:
                pass

    def _close_input(self) -> None:
        if self._input is not None:
            self._input.close()

    def _leader_ended(self) -> None:
        self._group |= keeper.belonging(f"{death.INCARNATION}={self.incarnation}", [self.pid])
        self.kill()
        self._popen.wait()
        self.abandon()
        self._on_end(self)


def log_tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")


def kernel_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started."""
    with open("/proc/vmstat") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)


def _start(spec: ChildSpec, incarnation: str, pipe: DeathPipe, log: Path,
           given: OpenInput | None) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **CHILD_ENVIRONMENT, **spec.env, **pipe.environment(), death.INCARNATION: incarnation}
    with open(log, "ab") as output:
        return subprocess.Popen(spec.command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                                stdin=subprocess.DEVNULL if given is None else given.read_fd,
                                start_new_session=True, pass_fds=(pipe.read_fd, *spec.pass_fds))
