"""One directory a run: where everything of it is written, and the proof that nobody else writes there.

Invariant: at most one living process holds a run directory. The kernel frees it with that process, also after kill -9.

    run.json                what this is: run id, digest of the configuration
    config.resolved.toml    the settings, reloads equal
    metrics.jsonl           one object a step          events.jsonl   what happened to actors
    episodes.jsonl          one object an episode of a simulator
    videos/step_000050/     episodes of the evaluation after that step, as MP4
    ledger.sqlite           every trajectory           logs/ROLE-N/INCARNATION.log
    registry.jsonl          who came and went in this life of the run
    checkpoints/  record/  keys/ (0700)  latest_checkpoint.txt  report.html
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cosmos_actor import death
from cosmos_actor.actors.configuration_difference import differing_keys
from cosmos_actor.actors.disk import named
from cosmos_actor.actors.errors import NotFound, RunDirectoryBusy, RunDirectoryMismatch, RunDirectoryUnusable
from cosmos_actor.actors.json_lines import JsonLinesWriter

FORMAT = 1
SETTING = "run.run_dir"
ANOTHER_CHECKPOINT = "go on from another checkpoint by writing its name into latest_checkpoint.txt, or start a new run"
"""What can be done about one that is damaged."""
SHOWN = 200
"""Characters of a path in a message."""
KEYS_NAMED = 8
"""Differing settings named in a refusal. All of them, when two recipes differ, would fill the screen."""


class RunPaths:
    """Where the parts of a run directory are. Looks at nothing and holds nothing: for readers of any process."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.identity = self.root / "run.json"
        self.lock = self.root / "lock"
        self.configuration = self.root / "config.resolved.toml"
        self.metrics = self.root / "metrics.jsonl"
        self.episodes = self.root / "episodes.jsonl"
        self.videos = self.root / "videos"
        self.events = self.root / "events.jsonl"
        self.registry = self.root / "registry.jsonl"
        self.ledger = self.root / "ledger.sqlite"
        self.logs = self.root / "logs"
        self.record = self.root / "record"
        self.checkpoints = self.root / "checkpoints"
        self.latest_checkpoint = self.root / "latest_checkpoint.txt"
        self.keys = self.root / "keys"
        self.report = self.root / "report.html"

    @classmethod
    def of_run(cls, root: Path | str) -> RunPaths:
        """The paths of a run that exists. Raises NotFound for a folder that is not a run directory."""
        paths = cls(root)
        if not paths.identity.exists():
            raise NotFound(f"{paths.root} is not a run directory (it has no run.json)", setting=SETTING)
        return paths

    def log(self, actor: str, incarnation: str) -> Path:
        return self.logs / actor / f"{incarnation}.log"

    def stacks(self, actor: str, incarnation: str) -> Path:
        """Where a life that is stuck leaves its Python stacks."""
        return self.logs / actor / f"{incarnation}.stacks.txt"

    @property
    def supervisor_stacks(self) -> Path:
        return self.logs / "supervisor.stacks.txt"

    def logs_of(self, actor: str) -> list[Path]:
        """The logs of an actor's lives, oldest first."""
        return sorted((self.logs / actor).glob("*.log"), key=_age)

    def describe(self) -> dict[str, Any]:
        """run.json: format, run_id, configuration_digest, created (seconds after 1970). Raises NotFound if damaged."""
        try:
            description: dict[str, Any] = json.loads(self.identity.read_text())
            return {**description, **{name: str(description[name]) for name in ("run_id", "configuration_digest")}}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NotFound(f"{self.identity} can not be read: {error}; start a new run", setting=SETTING) from error

    def owner_pid(self) -> int | None:
        """The living process that holds the directory, or None. Damaged words in the lock are nobody's name: the kernel
        knows who holds it."""
        try:
            owner = self.lock.read_text()
            return int(owner.partition(":")[0]) if owner and death.alive(owner) else None
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise _unusable(self, error) from error


class RunDirectory(RunPaths):
    """A run directory that this process holds until `close` or its death."""

    def __init__(self, root: Path | str, lock_fd: int) -> None:
        super().__init__(root)
        self._lock_fd: int | None = lock_fd
        self._writers: dict[Path, JsonLinesWriter] = {}

    @classmethod
    def create(cls, root: Path | str, configuration_digest: str, *, run_id: str, resolved: str = "") -> RunDirectory:
        """Take an absent or empty folder for a new run. `resolved` is the text of config.resolved.toml.

        Raises RunDirectoryBusy (naming the pid) or RunDirectoryMismatch: it holds a run already, or things that are
        not ours. Raises RunDirectoryUnusable when nothing can be written there.
        """
        paths = RunPaths(root)
        with _named(paths):
            _refuse_foreign(paths)
            directory = cls(root, _lock(paths))
            if paths.identity.exists():
                directory.close()
                raise _refusal_of_existing(paths, configuration_digest, resolved)
            directory._lay_out(configuration_digest, run_id, resolved)
        return directory

    @classmethod
    def open_for_resume(cls, root: Path | str, configuration_digest: str, *, resolved: str = "",
                        resumable: Collection[str] = ()) -> RunDirectory:
        """Take the directory of a run that ended, to go on with it under the same configuration.

        `resumable`: dotted settings that may change between the two (the digest leaves them out); the new values are
        written. Raises NotFound, RunDirectoryBusy, RunDirectoryUnusable, or RunDirectoryMismatch naming the settings
        that differ.
        """
        paths = RunPaths.of_run(root)
        with _named(paths):
            directory = cls(root, _lock(paths))
            if paths.describe()["configuration_digest"] != configuration_digest:
                directory.close()
                raise _other_configuration(paths, resolved, resumable)
            if resolved:
                write_whole(paths.configuration, resolved)
        return directory

    @property
    def run_id(self) -> str:
        return str(self.describe()["run_id"])

    def writer(self, path: Path) -> JsonLinesWriter:
        """The one writer of `path` (events, metrics) in this process; closed with the directory."""
        if path not in self._writers:
            self._writers[path] = JsonLinesWriter(path)
        return self._writers[path]

    def close(self) -> None:
        """Let go of the directory. A second close does nothing."""
        for writer in self._writers.values():
            writer.close()
        if self._lock_fd is not None:
            with suppress(OSError):  # of a disk that became read-only; how the run ended has been said
                os.ftruncate(self._lock_fd, 0)  # this process may live on: `owner_pid` must not name it
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> dict[str, Any]:
        return {path.name: writer.statistics() for path, writer in self._writers.items()}

    def _lay_out(self, configuration_digest: str, run_id: str, resolved: str) -> None:
        for folder in (self.logs, self.checkpoints):
            folder.mkdir(exist_ok=True)
        self.keys.mkdir(mode=0o700, exist_ok=True)
        write_whole(self.configuration, resolved)
        write_whole(self.identity, json.dumps({  # last: only a folder with run.json is a run
            "format": FORMAT, "run_id": run_id, "configuration_digest": configuration_digest, "created": time.time(),
        }, indent=1) + "\n")


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file: whoever reads it, and whatever kills the writer, sees the old content or the new one.

    `durable`: it is on the disk when this returns. What the file system refuses is an OSError with the file's name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            make_durable(path.parent, below=False)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise named(error, path) from error


def make_durable(path: Path, *, below: bool = True) -> None:
    """Have a file, or a folder's names and all `below` it, on the disk: what a power cut or a dying disk leaves.

    What is not there is passed over. Raises OSError with the path.
    """
    try:
        if below and path.is_dir():
            for entry in path.iterdir():
                make_durable(entry)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return
    except OSError as error:
        raise named(error, path) from error


def _age(log: Path) -> tuple[int, int]:
    """Last written first; lives of one supervisor, which may be over within a tick of the clock, by their number."""
    number = log.name.partition("-")[0]
    return log.stat().st_mtime_ns, int(number) if number.isdigit() else 0


@contextmanager
def _named(paths: RunPaths) -> Iterator[None]:
    """What the file system refuses (no space, no right, no such device) becomes one line about the run directory."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise _unusable(paths, error) from error


def _unusable(paths: RunPaths, error: OSError | ValueError) -> RunDirectoryUnusable:
    shown = str(paths.root) if len(str(paths.root)) <= SHOWN else f"{str(paths.root)[:SHOWN]}…"
    return RunDirectoryUnusable(f"{shown!r} can not be a run directory: {getattr(error, 'strerror', None) or error}",
                                setting=SETTING)


def _refuse_foreign(paths: RunPaths) -> None:
    if paths.root.exists() and not paths.root.is_dir():
        raise RunDirectoryMismatch(f"{paths.root} is a file, not a directory", setting=SETTING)
    paths.root.mkdir(parents=True, exist_ok=True)
    if paths.identity.exists():
        return
    half_made = {path.name for path in (paths.lock, paths.configuration, paths.logs, paths.checkpoints, paths.keys)}
    half_written = tuple(f".{path.name}." for path in (paths.configuration, paths.identity))
    foreign = sorted(entry.name for entry in paths.root.iterdir()
                     if entry.name not in half_made and not entry.name.startswith(half_written))
    if foreign:
        raise RunDirectoryMismatch(f"{paths.root} is not a run directory and not empty (it has {foreign[0]}); "
                                   "name another directory", setting=SETTING)


def _lock(paths: RunPaths) -> int:
    """A descriptor that holds the directory. It is not inherited, so that no child can hold it on."""
    fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        owner = paths.owner_pid()
        raise RunDirectoryBusy(f"{paths.root} is in use by process {owner or 'unknown'}; "
                               "stop it or name another directory", setting=SETTING) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, death.describe(os.getpid(), "lock").encode(), 0)
    return fd


def _refusal_of_existing(paths: RunPaths, configuration_digest: str, resolved: str) -> RunDirectoryMismatch:
    if paths.describe()["configuration_digest"] != configuration_digest:
        return _other_configuration(paths, resolved, ())
    return RunDirectoryMismatch(
        f"{paths.root} holds a run already; go on with it by --resume or name another directory", setting=SETTING)


def _other_configuration(paths: RunPaths, resolved: str, resumable: Collection[str]) -> RunDirectoryMismatch:
    line = f"{paths.root} is of another configuration"
    if resolved and paths.configuration.exists():
        keys = [key for key in differing_keys(paths.configuration.read_text(), resolved) if key not in resumable]
        if not keys:
            return RunDirectoryMismatch(
                f"{paths.configuration} and {paths.identity.name} do not belong together: one of them was changed, or "
                "another version of this program made them; put it back, or start a new run", setting=SETTING)
        more = f" and {len(keys) - KEYS_NAMED} more" if len(keys) > KEYS_NAMED else ""
        line += f"; these differ: {', '.join(keys[:KEYS_NAMED])}{more}"
    return RunDirectoryMismatch(f"{line}; name another directory", setting=SETTING)
