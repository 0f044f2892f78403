"""A job in one process is stopped by signals as one of many is; a signal before the first step ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from cosmos_actor.job.inproc import stopped_by_signals
from cosmos_actor.job.job import Job, StopAsked
from cosmos_actor.job.launch import hang_up


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_the_job_to_stop_and_says_so(number: signal.Signals) -> None:
    job, notices = SimpleNamespace(stop_asked=[]), []
    before = signal.getsignal(number)
    with stopped_by_signals(job, SimpleNamespace(notice=notices.append)):
        os.kill(os.getpid(), number)
    assert job.stop_asked == [f"asked to stop by {number.name}"] and notices == [
        f"{number.name}: finishing the step in hand"]
    assert signal.getsignal(number) is before


def test_a_terminal_that_nohup_has_taken_away_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert hang_up() == ()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert hang_up() == (signal.SIGHUP,)


def test_in_another_thread_nothing_is_changed() -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            with stopped_by_signals(SimpleNamespace(stop_asked=[]), SimpleNamespace(notice=print)):
                pass
        except BaseException as error:  # to be seen by the test's own thread
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(10.0)
    assert failures == []


def test_before_the_first_step_of_a_life_a_stop_ends_every_wait_and_later_it_waits_for_the_step() -> None:
    job = object.__new__(Job)
    job._ended, job._hand_off, job.stop_asked, job._begun = None, None, ["asked to stop"], False
    job.fleet, job.weights = SimpleNamespace(lost=None), SimpleNamespace(check=lambda: None)
    with pytest.raises(StopAsked, match="asked to stop"):
        job.check_interrupted()
    job._begun = True
    job.check_interrupted()


def test_an_interrupt_that_is_swallowed_ends_the_job_after_its_step() -> None:
    job = SimpleNamespace(stop_asked=[])
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_signals(job, SimpleNamespace(notice=print)), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert job.stop_asked == ["interrupted"] and signal.getsignal(signal.SIGINT) is before
