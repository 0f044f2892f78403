"""The ledger's sentences, each broken on purpose."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cosmos_actor.actors.ledger import (
    PREDECESSORS,
    AlreadyDispatched,
    IllegalTransition,
    Ledger,
    LedgerError,
    LedgerUnusable,
    TrainedTwice,
    UnknownTrajectory,
)


def keys_of(group: int, samples: int = 4, attempt: int = 0) -> list[tuple[str, int]]:
    return [(f"g{group:06d}/{index}", attempt) for index in range(samples)]


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", clock=lambda: 1.5) as opened:
        yield opened


def to_buffer(ledger: Ledger, keys: list[tuple[str, int]], step: int = 0) -> None:
    ledger.dispatched(keys, step, step)
    ledger.generated(keys, step, step)
    ledger.buffered(keys)


def test_every_state_is_in_the_balance(ledger):
    for group in range(5):
        ledger.dispatched(keys_of(group), 0, 0)
    for group in range(1, 5):
        ledger.generated(keys_of(group), 0, 0)
    for group in range(2, 5):
        ledger.buffered(keys_of(group))
    ledger.trained(keys_of(3), 1)
    ledger.dropped(keys_of(4)[:1], "too stale")
    ledger.dropped(keys_of(4)[1:], "buffer full")
    assert ledger.balance() == {
        "dispatched": 20,
        "trained": 4,
        "dropped": {"too stale": 1, "buffer full": 3},
        "buffered": 4,
        "in_flight": 8,
        "balanced": True,
    }


def test_a_row_keeps_what_is_known_of_it(ledger):
    keys = keys_of(7, 1)
    ledger.dispatched(keys, 3, 2)
    ledger.generated(keys, 2, 4)
    ledger.buffered(keys)
    ledger.trained(keys, 5)
    assert ledger.history("g000007/0") == [
        {
            "id": "g000007/0", "attempt": 0, "group_id": "g000007", "status": "trained", "reason": None,
            "dispatched_at_step": 3, "version_dispatch": 2, "version_min": 2, "version_max": 4,
            "trained_step": 5, "dispatched_time": 1.5, "changed_time": 1.5,
        }
    ]


def test_trained_twice_names_the_id_and_both_steps_and_changes_nothing(ledger):
    to_buffer(ledger, keys_of(0) + keys_of(1))
    ledger.trained(keys_of(0), 3)
    with pytest.raises(TrainedTwice, match=r"g000000/2 attempt 0 would be trained twice: at step 3 and step 4"):
        ledger.trained(keys_of(1) + keys_of(0)[2:], 4)
    assert ledger.balance()["buffered"] == 4
    with pytest.raises(TrainedTwice, match="at step 4 and step 4"):
        ledger.trained(keys_of(1) * 2, 4)
    assert ledger.balance()["trained"] == 4


@pytest.mark.parametrize("wanted", ["dispatched", "generated", "buffered", "trained", "dropped"])
def test_every_illegal_transition_raises_and_changes_nothing(ledger, wanted):
    arguments = {"dispatched": (), "generated": (0, 0), "buffered": (), "trained": (1,), "dropped": ("x",)}
    method = getattr(ledger, {"dispatched": "asked_again"}.get(wanted, wanted))
    path = {"dispatched": [], "generated": ["generated"], "buffered": ["generated", "buffered"]}
    path.update(trained=[*path["buffered"], "trained"], dropped=["dropped"])
    for number, (state, steps) in enumerate(path.items()):
        ledger.dispatched(keys_of(number), 0, 0)
        for step in steps:
            getattr(ledger, step)(keys_of(number), *arguments[step])
        if state not in PREDECESSORS[wanted]:
            before = ledger.balance()
            with pytest.raises((IllegalTransition, TrainedTwice), match=f"g{number:06d}/0"):
                method(keys_of(number), *arguments[wanted])
            assert ledger.balance() == before


def test_what_died_with_its_sampler_is_asked_for_again_and_still_one_trajectory(ledger):
    ledger.dispatched(keys_of(0), 0, 0)
    ledger.generated(keys_of(0), 3, 3)
    ledger.asked_again(keys_of(0))
    row = ledger.history(keys_of(0)[0][0])[0]
    assert (row["status"], row["version_min"]) == ("dispatched", None)
    ledger.generated(keys_of(0), 4, 4)
    assert ledger.balance() == {"dispatched": 4, "trained": 0, "dropped": {}, "buffered": 0, "in_flight": 4,
                                "balanced": True}


def test_what_was_never_dispatched_is_unknown(ledger):
    with pytest.raises(UnknownTrajectory, match="g000009/0 attempt 0 is to be buffered, but was never dispatched"):
        ledger.buffered(keys_of(9))


def test_a_dropped_trajectory_is_dispatched_again_under_a_higher_attempt(ledger):
    ledger.dispatched(keys_of(0), 0, 0)
    with pytest.raises(AlreadyDispatched, match="attempt 0 is dispatched; drop it first"):
        ledger.dispatched(keys_of(0, attempt=1), 1, 1)
    ledger.dropped(keys_of(0), "rollout lost")
    with pytest.raises(AlreadyDispatched):
        ledger.dispatched(keys_of(0), 1, 1)
    to_buffer(ledger, keys_of(0, attempt=1))
    with pytest.raises(IllegalTransition):
        ledger.generated(keys_of(0), 0, 0)
    ledger.trained(keys_of(0, attempt=1), 1)
    assert ledger.balance() == {
        "dispatched": 8, "trained": 4, "dropped": {"rollout lost": 4}, "buffered": 0, "in_flight": 0, "balanced": True,
    }
    assert [row["status"] for row in ledger.history("g000000/0")] == ["dropped", "trained"]


def test_a_refused_dispatch_counts_nothing(ledger):
    ledger.dispatched(keys_of(0), 0, 0)
    with pytest.raises(AlreadyDispatched):
        ledger.dispatched(keys_of(1) + keys_of(0), 0, 0)
    assert ledger.balance()["dispatched"] == 4 and ledger.balance()["balanced"]


def test_roll_back_drops_what_came_after_the_checkpoint(ledger):
    for group in range(5):
        to_buffer(ledger, keys_of(group))
    for group in range(3):
        ledger.trained(keys_of(group), group + 1)
    ledger.dispatched(keys_of(5), 3, 3)
    assert ledger.roll_back(2, "policy-0 killed") == 16
    balance = ledger.balance()
    assert balance["trained"] == 8 and balance["buffered"] == balance["in_flight"] == 0 and balance["balanced"]
    assert balance["dropped"] == {"rolled back to step 2: policy-0 killed": 16}
    to_buffer(ledger, keys_of(2, attempt=1))
    ledger.trained(keys_of(2, attempt=1), 3)


def test_roll_back_keeps_what_the_restored_buffer_holds(ledger):
    for group in range(4):
        to_buffer(ledger, keys_of(group))
    ledger.trained(keys_of(0), 1)
    ledger.trained(keys_of(1), 2)
    ledger.dropped(keys_of(2), "too stale")
    assert ledger.buffered_keys() == keys_of(3)
    assert ledger.roll_back(1, "resume", keep=keys_of(1) + keys_of(2)) == 0
    balance = ledger.balance()
    assert ledger.buffered_keys() == keys_of(1) + keys_of(2)
    assert (balance["trained"], balance["buffered"]) == (4, 8)
    assert balance["dropped"] == {"rolled back to step 1: resume": 4}
    ledger.trained(keys_of(1) + keys_of(2), 2)


def test_roll_back_refuses_to_keep_what_the_checkpoint_trained(ledger):
    to_buffer(ledger, keys_of(0) + keys_of(1))
    ledger.trained(keys_of(0), 1)
    before = ledger.balance()
    with pytest.raises(IllegalTransition, match="g000000/0 attempt 0 is trained and can not become buffered"):
        ledger.roll_back(1, "resume", keep=keys_of(1) + keys_of(0))
    with pytest.raises(UnknownTrajectory):
        ledger.roll_back(1, "resume", keep=keys_of(8))
    assert ledger.balance() == before


def test_the_file_is_the_ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as first:
        to_buffer(first, keys_of(0))
        expected = first.balance()
    with Ledger(path) as second:
        assert second.balance() == expected
        second.trained(keys_of(0), 1)


def test_a_reader_changes_nothing_and_makes_no_file(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(LedgerError, match="no ledger at"):
        Ledger(path, read_only=True)
    assert not path.exists()
    Ledger(path).close()
    with Ledger(path, read_only=True) as reader:
        assert reader.balance()["balanced"]
        with pytest.raises(LedgerError, match="read only"):
            reader.dispatched(keys_of(0), 0, 0)


def test_another_file_or_format_is_refused(tmp_path):
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(LedgerUnusable, match=r"other.sqlite can not be used: file is not a database.*start a new run"):
        Ledger(other)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger._database.execute("PRAGMA user_version = 9")
    with pytest.raises(LedgerError, match="format 9"):
        Ledger(path)


def test_a_full_disk_is_one_line_and_the_ledger_goes_on_when_there_is_room(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        pages = ledger._database.execute("PRAGMA page_count").fetchone()[0]
        ledger._database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerUnusable, match=r"ledger\.sqlite can not be used: database or disk is full"):
            ledger.dispatched([(f"g{number}/0", 0) for number in range(1000)], 1, 1)
        ledger._database.execute("PRAGMA max_page_count = 10000")
        assert ledger.balance()["dispatched"] == 0
        ledger.dispatched(keys_of(0), 1, 1)
        assert ledger.balance()["balanced"]


def test_a_file_that_its_writer_has_not_begun_is_no_ledger_yet(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.touch()
    with pytest.raises(LedgerError, match="not a ledger yet"):
        Ledger(path, read_only=True)


def test_a_row_that_vanishes_unbalances_the_ledger(ledger):
    to_buffer(ledger, keys_of(0))
    ledger._database.execute("DELETE FROM trajectories WHERE id = 'g000000/2'")
    assert not ledger.balance()["balanced"]


def test_threads_share_a_ledger(ledger):
    threads = [threading.Thread(target=to_buffer, args=(ledger, keys_of(group))) for group in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert ledger.balance()["buffered"] == 64


WRITER = """
import sys
from cosmos_actor.actors.ledger import Ledger
ledger = Ledger(sys.argv[1])
start = ledger.balance()["dispatched"]
for group in range(start, 10**9):
    keys = [(f"g{group:09d}/{i}", 0) for i in range(512)]
    ledger.dispatched(keys, group, group)
    ledger.generated(keys, group, group)
    ledger.buffered(keys)
    ledger.trained(keys[:400], group)
    ledger.dropped(keys[400:], "too stale")
    print(group, flush=True)
"""

READER = """
import json, sys
from cosmos_actor.actors.ledger import Ledger
with Ledger(sys.argv[1], read_only=True) as ledger:
    print(json.dumps(ledger.balance()))
"""


def test_killed_while_writing_it_is_readable_and_balanced(tmp_path):
    path = tmp_path / "ledger.sqlite"
    for life in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        try:
            assert writer.stdout is not None and writer.stdout.readline()
            balances = [read_elsewhere(path) for _ in range(1 + (life == 0))]
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait(10)
            writer.stdout.close()
        assert all(balance["balanced"] and balance["dispatched"] >= 512 for balance in balances)
        check_after_death(path, at_least=balances[-1]["dispatched"])


INTERRUPTED = """
import sys, time
from cosmos_actor.actors.ledger import Ledger
ledger = Ledger(sys.argv[1])
ledger.dispatched([("g000000/0", 0)], 0, 0)
with ledger._transaction() as database:
    database.execute("UPDATE counters SET value = 999")
    database.execute("UPDATE trajectories SET status = 'trained'")
    print("in the middle", flush=True)
    time.sleep(60)
"""


def test_killed_in_the_middle_of_a_transaction_nothing_of_it_is_there(tmp_path, popen):
    path = tmp_path / "ledger.sqlite"
    writer = popen([sys.executable, "-c", INTERRUPTED, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"in the middle\n"
    assert read_elsewhere(path)["in_flight"] == 1
    writer.kill()
    writer.wait(10)
    with Ledger(path) as ledger:
        assert ledger.balance() == {
            "dispatched": 1, "trained": 0, "dropped": {}, "buffered": 0, "in_flight": 1, "balanced": True}
        ledger.generated([("g000000/0", 0)], 0, 0)


def read_elsewhere(path: Path) -> dict:
    done = subprocess.run([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, timeout=30, check=True)
    return json.loads(done.stdout)


def check_after_death(path: Path, at_least: int) -> None:
    with Ledger(path) as ledger:
        balance = ledger.balance()
        assert balance["balanced"] and balance["dispatched"] >= at_least
        assert balance["dispatched"] % 512 == 0 and balance["trained"] % 400 == 0
        assert ledger._database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_512_rows_take_less_than_10_ms(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        took = []
        for group in range(12):
            keys = keys_of(group, 512)
            for call in (
                lambda keys=keys: ledger.dispatched(keys, 0, 0),
                lambda keys=keys: ledger.generated(keys, 0, 0),
                lambda keys=keys: ledger.buffered(keys),
                lambda keys=keys: ledger.trained(keys, 1),
            ):
                start = time.process_time()
                call()
                took.append(time.process_time() - start)
    assert sorted(took)[len(took) // 2] < 0.010


class LedgerAgainstModel(RuleBasedStateMachine):
    """Any sequence of calls leaves the ledger equal to a dict, or raises and leaves it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.ledger = Ledger(Path(self.directory.name) / "ledger.sqlite")
        self.rows: dict[tuple[str, int], tuple[str, object]] = {}

    @rule(group=st.integers(0, 2), attempt=st.integers(0, 3))
    def dispatch(self, group, attempt):
        key = (f"g{group}/0", attempt)
        older = [(k[1], row[0]) for k, row in self.rows.items() if k[0] == key[0]]
        if any(number >= attempt or status != "dropped" for number, status in older):
            with pytest.raises(AlreadyDispatched):
                self.ledger.dispatched([key], 0, 0)
        else:
            self.ledger.dispatched([key], 0, 0)
            self.rows[key] = ("dispatched", None)

    @rule(group=st.integers(0, 2), attempt=st.integers(0, 3), to=st.sampled_from([*PREDECESSORS]), n=st.integers(1, 3))
    def advance(self, group, attempt, to, n):
        key, detail = (f"g{group}/0", attempt), {"trained": n, "dropped": f"reason {n}"}.get(to)
        arguments = {"dispatched": (), "generated": (0, 0), "buffered": ()}.get(to, (detail,))
        method = getattr(self.ledger, {"dispatched": "asked_again"}.get(to, to))
        if self.rows.get(key, ("",))[0] in PREDECESSORS[to]:
            method([key], *arguments)
            self.rows[key] = (to, detail)
        else:
            with pytest.raises(LedgerError):
                method([key], *arguments)

    @rule(step=st.integers(0, 3))
    def roll_back(self, step):
        undone = [
            key for key, (status, detail) in self.rows.items()
            if status != "dropped" and not (status == "trained" and detail <= step)
        ]
        assert self.ledger.roll_back(step, "test") == len(undone)
        self.rows.update({key: ("dropped", f"rolled back to step {step}: test") for key in undone})

    @invariant()
    def agrees(self):
        balance = self.ledger.balance()
        states = [status for status, _ in self.rows.values()]
        assert balance["balanced"] and balance["dispatched"] == len(states)
        assert balance["trained"] == states.count("trained") and balance["buffered"] == states.count("buffered")
        assert sum(balance["dropped"].values()) == states.count("dropped")

    def teardown(self):
        self.ledger.close()
        self.directory.cleanup()


TestLedgerAgainstModel = LedgerAgainstModel.TestCase
TestLedgerAgainstModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
