"""A signal to `up`, whatever the job is doing: it ends in time with the right code, and goes on as if nothing had been.

One job is stopped in one phase after another and resumed each time; its losses are those of a job that nobody stopped.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.job import signalled
from tests.job.runs import START_S, Run
from tests.waiting import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
STOPPED_WITHIN_S = 60.0
"""Four times what is promised: a machine may do other things. What was seen is in the report of the test."""
GONE_WITHIN_S = 20.0
"""As above."""
TERM, HANG_UP, INTERRUPT = "SIGTERM", "SIGHUP", "SIGINT"


class Lives:
    """One job, life after life, each ended by signals at a point of its loop."""

    def __init__(self, run: Run, orders: Path, record: Callable[[str, object], None]) -> None:
        self._run, self._orders, self._record = run, orders, record

    def __call__(self, point: str, signals: Sequence[str], *options: str, code: int = 0) -> str:
        """What that life said."""
        run = self._run
        signalled.order(self._orders, run.directory, point, signals)
        resume = resuming(run)
        process = run.start(*resume, *options, sets=[] if resume else ['run.loop="tests.job.signalled:run"'])
        run.wait(process, code=code)
        seconds = time.monotonic() - signalled.sent_at(self._orders)
        self._record(f"{'+'.join(signals)} in {point}, s", round(seconds, 2))
        assert run.processes() == [] and seconds < STOPPED_WITHIN_S, f"{signals} in {point}: {seconds} s"
        said = run.output.read_text()
        run.output.write_text("")
        assert not any(word in said for word in ("Traceback", "error", "never awaited", "was destroyed")), said
        return said


@pytest.fixture
def live(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
         record_property: Callable[[str, object], None]) -> Lives:
    monkeypatch.setenv(signalled.ORDERS, str(tmp_path / "order"))
    return Lives(run, tmp_path / "order", record_property)


def test_a_stop_in_each_phase_is_obeyed_and_changes_no_loss(run: Run, live: Lives, uninterrupted: Run) -> None:
    assert "stopped after step 1 of 10" in live("sft", [TERM])
    assert "stopped after step 5 of 10" in live("first weights", [INTERRUPT])
    assert "stopped after step 6 of 10" in live("generate", [TERM])
    assert "stopped at once by SIG" in live("update", [TERM, INTERRUPT])
    saved = saved_step(run)  # the second signal came before or after the step in hand was saved
    assert saved in (6, 7)
    orders = {7: ("update", TERM), 8: ("checkpoint", HANG_UP), 9: ("judge", TERM)}  # every second step has a checkpoint
    for step in range(saved + 1, 10):
        point, kind = orders[step]
        assert f"stopped after step {step} of 10" in live(point, [kind])
    assert "all 10 steps are done" in live("checkpoint", [TERM])
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def test_in_one_process_too(run: Run, live: Lives, uninterrupted: Run) -> None:
    """Ctrl-C ends it at once, as ever in Python, and its step is done again."""
    assert "stopped after step 2 of 10" in live("checkpoint", [TERM], "--inproc")
    assert "stopped after step 5 of 10" in live("generate", [HANG_UP], "--inproc")
    live("update", [INTERRUPT], "--inproc", code=130)
    assert "stopped after step 6 of 10" in live("update", [TERM], "--inproc")
    run.finish("--resume")
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def test_a_signal_while_it_starts_leaves_nothing_behind(run: Run, uninterrupted: Run) -> None:
    """In its first seconds: before it listens to signals it ends by them, as any process does, with nothing begun."""
    choose = random.Random(3)
    for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) * 2:
        told = lives_told(run)
        process = run.start(*resuming(run))
        if kind is signal.SIGINT:  # until then it may be the interpreter that is interrupted
            eventually(partial(another_life, run, told), "the name of its run directory", within_s=START_S)
        time.sleep(choose.uniform(0.5, 6.0))
        process.send_signal(kind)
        begun = time.monotonic()
        assert process.wait(STOPPED_WITHIN_S) in (0, -kind, 130)
        assert time.monotonic() - begun < STOPPED_WITHIN_S and run.processes() == []
    assert "Traceback" not in run.output.read_text()
    run.finish(*resuming(run))
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def test_kill_9_in_its_first_seconds_leaves_no_process_and_the_directory_is_good(run: Run, uninterrupted: Run) -> None:
    choose = random.Random(6)
    for second in range(1, 6):
        process = run.start(*resuming(run))
        time.sleep(second + choose.uniform(-0.5, 0.5))
        process.kill()
        process.wait(10)
        eventually(lambda: not run.processes(), f"the end of all, killed in second {second}", within_s=GONE_WITHIN_S)
    assert "Traceback" not in run.output.read_text() and "error" not in run.output.read_text()
    run.finish(*resuming(run))
    assert run.losses() == uninterrupted.losses() and run.balance()["balanced"]


def saved_step(run: Run) -> int:
    """Of the latest checkpoint."""
    return int((run.directory / "latest_checkpoint.txt").read_text().strip().removeprefix("iter_"))


def resuming(run: Run) -> list[str]:
    """`--resume` for what is a run already."""
    return ["--resume"] if (run.directory / "run.json").exists() else []


def lives_told(run: Run) -> int:
    """How many lives have named the run directory."""
    return run.output.read_text().count("run directory ") if run.output.exists() else 0


def another_life(run: Run, told: int) -> bool:
    return lives_told(run) > told
