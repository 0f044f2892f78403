"""The book of trajectories: every one that was ever dispatched is in exactly one state, and the states add up.

    dispatched <─> generated ──> buffered ──> trained
        └──────────────┴─────────────┴──────> dropped(reason)

One row is one attempt at one trajectory: (id, attempt). At most one attempt of an id is not dropped, so nothing is
trained twice; a dropped id may be dispatched again under a higher attempt. Only `roll_back` leads out of `trained`.
Every call is one transaction: all its rows change or none does, also when the process is killed in the middle.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_actor.actors.errors import UserError

Key = tuple[str, int]
"""(trajectory id, attempt)"""

IN_FLIGHT = ("dispatched", "generated")
OPEN = (*IN_FLIGHT, "buffered")
PREDECESSORS = {
    "dispatched": ("generated",),
    "generated": ("dispatched",),
    "buffered": ("generated",),
    "trained": ("generated", "buffered"),
    "dropped": OPEN,
}

BUSY_TIMEOUT_S = 5.0
"""Longest wait for another writer of the file; without it a second writer would fail at the first collision."""

FORMAT = 1
SCHEMA = f"""
CREATE TABLE trajectories (
    id TEXT NOT NULL, attempt INTEGER NOT NULL, group_id TEXT NOT NULL, status TEXT NOT NULL, reason TEXT,
    dispatched_at_step INTEGER NOT NULL, version_dispatch INTEGER NOT NULL, version_min INTEGER, version_max INTEGER,
    trained_step INTEGER, dispatched_time REAL NOT NULL, changed_time REAL NOT NULL,
    PRIMARY KEY (id, attempt)) WITHOUT ROWID;
CREATE UNIQUE INDEX one_living_attempt ON trajectories (id) WHERE status <> 'dropped';
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES ('dispatched', 0);
PRAGMA user_version = {FORMAT};
"""


class LedgerError(Exception):
    """The ledger refuses: what was asked contradicts what is written."""


class LedgerUnusable(UserError, LedgerError):
    """The file: it is damaged, or the file system does not let it be written. Nothing of the call has changed it."""

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(f"{path} can not be used: {error}; put right what it names, or start a new run",
                         setting="run.run_dir")


class UnknownTrajectory(LedgerError):
    """No such (id, attempt) was ever dispatched."""

    def __init__(self, key: Key, wanted: str) -> None:
        super().__init__(f"trajectory {key[0]} attempt {key[1]} is to be {wanted}, but was never dispatched")
        self.key = key


class IllegalTransition(LedgerError):
    """The trajectory is in a state that does not lead to the one that was asked for."""

    def __init__(self, key: Key, status: str, wanted: str) -> None:
        super().__init__(f"trajectory {key[0]} attempt {key[1]} is {status} and can not become {wanted}")
        self.key, self.status, self.wanted = key, status, wanted


class AlreadyDispatched(LedgerError):
    """The id has a living attempt, or one with this number or a higher one."""

    def __init__(self, key: Key, status: str, attempt: int) -> None:
        super().__init__(
            f"trajectory {key[0]} can not be dispatched as attempt {key[1]}: attempt {attempt} is {status}; "
            "drop it first and take a higher attempt"
        )
        self.key = key


class TrainedTwice(LedgerError):
    """The trajectory was trained before."""

    def __init__(self, key: Key, first_step: int, second_step: int) -> None:
        super().__init__(
            f"trajectory {key[0]} attempt {key[1]} would be trained twice: at step {first_step} and step {second_step}"
        )
        self.key, self.first_step, self.second_step = key, first_step, second_step


class Ledger:
    """One sqlite file. One process writes it; any number may read it meanwhile. Usable from several threads.

    Every method raises LedgerUnusable for a damaged file, or one that can not be written.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, clock: Callable[[], float] = time.time) -> None:
        """Opens the file, or makes it. Raises LedgerError for a file that is none, or is missing when only read."""
        self.path = Path(path)
        self._read_only = read_only
        self._clock = clock
        self._lock = threading.Lock()
        self._database = _open(self.path, read_only)

    def dispatched(self, keys: Iterable[Key], step: int, version: int) -> None:
        """New rows: asked for at `step` under weight version `version`. Raises AlreadyDispatched."""
        now = self._clock()
        rows = [(i, a, i.rpartition("/")[0], "dispatched", step, version, now, now) for i, a in keys]
        with self._transaction() as database:
            for row in rows:
                self._refuse_older_attempt(row[:2])
            database.executemany(
                "INSERT INTO trajectories (id, attempt, group_id, status, dispatched_at_step, version_dispatch,"
                " dispatched_time, changed_time) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            database.execute("UPDATE counters SET value = value + ? WHERE name = 'dispatched'", (len(rows),))

    def generated(self, keys: Iterable[Key], version_min: int, version_max: int) -> None:
        """Sampled, by weights from `version_min` to `version_max`."""
        self._advance(list(keys), "generated", version_min=version_min, version_max=version_max)

    def asked_again(self, keys: Iterable[Key]) -> None:
        """What was sampled died with its sampler, and the same is asked for once more."""
        self._advance(list(keys), "dispatched", version_min=None, version_max=None)

    def buffered(self, keys: Iterable[Key]) -> None:
        """In the replay buffer."""
        self._advance(list(keys), "buffered")

    def trained(self, keys: Iterable[Key], step: int) -> None:
        """Part of the update of `step`. Raises TrainedTwice, and then none of `keys` has changed."""
        self._advance(list(keys), "trained", trained_step=step)

    def dropped(self, keys: Iterable[Key], reason: str) -> None:
        """Given up. The balance counts it under `reason`, so keep numbers and ids out of it."""
        self._advance(list(keys), "dropped", reason=reason)

    def roll_back(self, to_step: int, reason: str, *, keep: Sequence[Key] = ()) -> int:
        """The job goes on from the checkpoint of `to_step`; returns how many more rows are dropped than before.

        What was trained after it, is buffered or in flight becomes dropped("rolled back to step N: reason"), except
        `keep`: what the restored replay buffer holds is buffered again, whatever became of it since.
        """
        why, now = f"rolled back to step {to_step}: {reason}", self._clock()
        with self._transaction() as database:
            undone = database.execute(
                "UPDATE trajectories SET status = 'dropped', reason = ?, changed_time = ?"
                f" WHERE status IN {OPEN} OR (status = 'trained' AND trained_step > ?)",
                (why, now, to_step),
            ).rowcount
            for key in keep:
                self._restore(key, now)
        return int(undone) - len(keep)

    def buffered_keys(self) -> list[Key]:
        """What is buffered now, in the order of the keys: what a checkpoint keeps for `roll_back`."""
        with self._reading():
            found = self._database.execute("SELECT id, attempt FROM trajectories WHERE status = 'buffered'")
            return [(row[0], row[1]) for row in found]

    def buffered_groups(self) -> list[tuple[str, int, int]]:
        """(group id, step it was dispatched at, version) of each group that is buffered now."""
        with self._lock:
            return self._database.execute(
                "SELECT DISTINCT group_id, dispatched_at_step, version_dispatch FROM trajectories"
                " WHERE status = 'buffered'").fetchall()

    def drop_open(self, reason: str) -> int:
        """Give up all that is in flight or buffered; how many trajectories that were."""
        with self._transaction() as database:
            return database.execute(
                f"UPDATE trajectories SET status = 'dropped', reason = ?, changed_time = ? WHERE status IN {OPEN}",
                (reason, self._clock())).rowcount

    def history(self, trajectory_id: str) -> list[dict[str, Any]]:
        """The rows of one id, one an attempt, oldest first."""
        query = "SELECT * FROM trajectories WHERE id = ? ORDER BY attempt"
        with self._reading():
            cursor = self._database.execute(query, (trajectory_id,))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def balance(self) -> dict[str, Any]:
        """{dispatched, trained, dropped: {reason: n}, buffered, in_flight, balanced}, all of one moment.

        `dispatched` is counted as rows are made, the others are counted from the rows: balanced says that they agree.
        """
        with self._reading():
            counts = self._database.execute(
                "SELECT status, reason, COUNT(*) FROM trajectories GROUP BY status, reason"
                " UNION ALL SELECT 'counter', NULL, value FROM counters WHERE name = 'dispatched'"
            ).fetchall()
        by_status: dict[str, int] = {}
        for status, _, number in counts:
            by_status[status] = by_status.get(status, 0) + number
        dispatched = by_status.pop("counter")
        return {
            "dispatched": dispatched,
            "trained": by_status.get("trained", 0),
            "dropped": {reason: number for status, reason, number in counts if status == "dropped"},
            "buffered": by_status.get("buffered", 0),
            "in_flight": sum(by_status.get(status, 0) for status in IN_FLIGHT),
            "balanced": dispatched == sum(by_status.values()),
        }

    def close(self) -> None:
        """Ends the use of the file; what was written stays."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading():
            self._begin()
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # sqlite itself has ended it where the disk was full
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.DatabaseError as error:
                raise LedgerUnusable(self.path, error) from error

    def _begin(self) -> None:
        if self._read_only:
            raise LedgerError(f"{self.path} was opened read only")
        try:
            self._database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise LedgerError(f"{self.path} can not be written after {BUSY_TIMEOUT_S:g} s: {error}") from error

    def _advance(self, keys: list[Key], status: str, **columns: object) -> None:
        assignments = ", ".join(f"{name} = ?" for name in ("status", "changed_time", *columns))
        values = (status, self._clock(), *columns.values())
        with self._transaction() as database:
            changed = database.executemany(
                f"UPDATE trajectories SET {assignments}"
                f" WHERE id = ? AND attempt = ? AND status IN ({', '.join(map(repr, PREDECESSORS[status]))})",
                [(*values, *key) for key in keys],
            ).rowcount
            if keys and changed != len(keys):
                self._explain(keys, status, columns.get("trained_step"))

    def _explain(self, keys: Sequence[Key], wanted: str, step: Any) -> None:
        """Undoes this call's rows and raises for the first key that stood in its way."""
        self._database.execute("ROLLBACK")
        self._begin()
        seen: set[Key] = set()
        for key in keys:
            row = self._database.execute(
                "SELECT status, trained_step FROM trajectories WHERE id = ? AND attempt = ?", key
            ).fetchone()
            if row is None:
                raise UnknownTrajectory(key, wanted)
            status, trained_step = (wanted, step) if key in seen else row
            if status == wanted == "trained":
                raise TrainedTwice(key, trained_step, step)
            if status not in PREDECESSORS[wanted]:
                raise IllegalTransition(key, status, wanted)
            seen.add(key)

    def _restore(self, key: Key, now: float) -> None:
        changed = self._database.execute(
            "UPDATE trajectories SET status = 'buffered', reason = NULL, trained_step = NULL, changed_time = ?"
            " WHERE id = ? AND attempt = ? AND status = 'dropped'",
            (now, *key),
        ).rowcount
        if changed != 1:
            row = self._database.execute("SELECT status FROM trajectories WHERE id = ? AND attempt = ?", key).fetchone()
            raise UnknownTrajectory(key, "buffered") if row is None else IllegalTransition(key, row[0], "buffered")

    def _refuse_older_attempt(self, key: Key) -> None:
        row = self._database.execute(
            "SELECT attempt, status FROM trajectories WHERE id = ? ORDER BY attempt DESC LIMIT 1", key[:1]
        ).fetchone()
        if row is not None and (row[0] >= key[1] or row[1] != "dropped"):
            raise AlreadyDispatched(key, row[1], row[0])


def _open(path: Path, read_only: bool) -> sqlite3.Connection:
    if read_only and not path.exists():
        raise LedgerError(f"no ledger at {path}")
    try:
        database = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.DatabaseError as error:
        raise LedgerUnusable(path, error) from error
    try:
        _prepare(database, path, read_only)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path, read_only: bool) -> None:
    try:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not read_only:
            database.execute("PRAGMA journal_mode = WAL")
            database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
            version = FORMAT
        database.execute("PRAGMA synchronous = NORMAL")
        damage = "ok" if read_only else database.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise LedgerUnusable(path, error) from error
    if damage != "ok":
        raise LedgerUnusable(path, sqlite3.DatabaseError(f"it is damaged: {damage}"))
    if version == 0:
        raise LedgerError(f"{path} is not a ledger yet")
    if version != FORMAT:
        raise LedgerError(f"{path} is a ledger of format {version}; this version reads format {FORMAT}")
