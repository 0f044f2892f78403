"""The supervisor's decisions, rule by rule, in pretended time."""

from __future__ import annotations

import pytest

from cosmos_actor.actors.decisions import EndKind
from cosmos_actor.actors.restart_policy import Outcome, Restart, Strategy
from tests.actors.scripted_supervision import PERMANENT, TEMPORARY, TRANSIENT, World, child


def three(strategy: Strategy = Strategy.ONE_FOR_ONE, **limits: float) -> World:
    return World(child("a"), child("b"), child("c"), strategy=strategy, **limits).start()


# ---- starting


def test_each_child_starts_when_those_before_it_are_ready() -> None:
    world = World(child("a"), child("b"), child("c"))
    world.take(world.core.start(0.0))
    assert world.took() == ["start a"]
    world.ready("a")
    assert world.took() == ["start b"] and not world.core.all_ready()
    world.ready("b")
    world.ready("c")
    assert world.took() == ["start c"] and world.core.all_ready()


def test_a_child_waits_only_for_whom_it_names() -> None:
    world = World(child("a"), child("b", after=()), child("c", after=("b",)))
    world.take(world.core.start(0.0))
    assert world.took() == ["start a", "start b"]
    world.ready("b")
    assert world.took() == ["start c"]


def test_a_child_that_is_not_ready_in_time_is_killed_and_the_job_ends_with_its_name() -> None:
    world = World(child("a"), child("b", start_s=7.0)).start(ready=False)
    world.ready("a")
    world.after(6.9)
    assert world.took() == ["start b"]
    world.after(0.1)
    assert world.took() == ["kill b: not ready 7 s after its start"]
    world.ends("b", reason="not ready 7 s after its start")
    assert world.took() == ["stopping failed_to_start: b failed to start: not ready 7 s after its start", "terminate a"]
    world.stops("a")
    assert world.took() == ["ended failed_to_start: b failed to start: not ready 7 s after its start"]


@pytest.mark.parametrize("restart", list(Restart))
def test_a_job_whose_first_start_fails_ends_without_a_second_attempt(restart: Restart) -> None:
    world = World(child("a", restart=restart)).start(ready=False)
    world.ends("a", reason="exit 1: no such model")
    assert world.core.end is not None and world.core.end.kind is EndKind.FAILED_TO_START
    assert world.core.end.reason == "a failed to start: exit 1: no such model"


# ---- one child ends


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("restart", list(Restart))
def test_restart_types_by_outcomes(restart: Restart, outcome: Outcome) -> None:
    world = World(child("a", restart=restart), child("b")).start()
    world.ends("a", outcome)
    again = restart is PERMANENT or (restart is TRANSIENT and outcome is Outcome.ABNORMAL)
    assert world.took() == (["restarting a in 0", "start a"] if again else [])
    assert ("a" in world.core.children) is (restart is not TEMPORARY), "a temporary child is forgotten, others are kept"
    assert world.state("b") == "ready"


def test_one_for_one_touches_nobody_else() -> None:
    world = three()
    world.ends("b")
    assert world.took() == ["restarting b in 0", "start b"]


def test_one_for_all_stops_the_others_in_reverse_and_starts_all_in_order() -> None:
    world = three(Strategy.ONE_FOR_ALL)
    world.ends("b")
    assert world.took() == ["restarting b in 0", "terminate c"]
    world.stops("c")
    assert world.took() == ["terminate a"]
    world.stops("a")
    assert world.took() == ["start a"]
    world.ready("a")
    world.ready("b")
    assert world.took() == ["start b", "start c"]


def test_rest_for_one_takes_along_only_those_that_started_later() -> None:
    world = three(Strategy.REST_FOR_ONE)
    world.ends("b")
    assert world.took() == ["restarting b in 0", "terminate c"]
    world.stops("c")
    assert world.took() == ["start b"]
    world.ready("b")
    assert world.took() == ["start c"] and world.alive["a"] == 1


def test_a_temporary_child_of_a_restarted_group_is_stopped_and_forgotten() -> None:
    world = World(child("a"), child("b", restart=TEMPORARY), child("c"), strategy=Strategy.ONE_FOR_ALL).start()
    world.ends("a")
    world.stops("c")
    world.stops("b")
    world.ready("a")
    assert world.took() == ["restarting a in 0", "terminate c", "terminate b", "start a", "start c"]
    assert list(world.core.children) == ["a", "c"]


def test_a_group_restart_brings_back_a_transient_child_that_had_finished() -> None:
    world = World(child("a"), child("b", restart=TRANSIENT), strategy=Strategy.ONE_FOR_ALL).start()
    world.ends("b", Outcome.NORMAL, "finished")
    world.ends("a")
    world.ready("a")
    assert world.took() == ["restarting a in 0", "start a", "start b"]


def test_a_member_of_the_group_that_dies_by_itself_meanwhile_costs_no_further_restart() -> None:
    world = three(Strategy.ONE_FOR_ALL, intensity=1)
    world.ends("b")
    world.ends("a")
    world.stops("c")
    assert world.took() == ["restarting b in 0", "terminate c", "start a"]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_a_child_alone_shares_nobodys_fate(strategy: Strategy) -> None:
    world = World(child("registry", alone=True, after=()), child("a"), child("b"), strategy=strategy).start()
    world.ends("registry")
    assert world.took() == ["restarting registry in 0", "start registry"]
    world.ready("registry")
    world.ends("a")
    if strategy is not Strategy.ONE_FOR_ONE:
        world.stops("b")
    world.ready("a")
    assert "terminate registry" not in world.took() and world.alive["registry"] == 2


# ---- too much


def test_more_than_intensity_restarts_within_the_period_end_everything_with_a_reason() -> None:
    world = three(intensity=2, period_s=60.0)
    for _ in range(2):
        world.ends("a")
        world.after(20.0)
        world.ready("a")
    world.took()
    world.ends("a", reason="killed by SIGSEGV")
    reason = "gave up: 3 restarts within 60 s, more than 2; the last: a killed by SIGSEGV"
    assert world.took() == [f"stopping gave_up: {reason}", "terminate c"]
    world.stops("c")
    world.stops("b")
    assert world.took() == ["terminate b", f"ended gave_up: {reason}"]
    assert world.core.end is not None and not world.core.end.ok


def test_restarts_of_all_children_count_together_and_old_ones_are_forgotten() -> None:
    world = three(intensity=1, period_s=10.0)
    world.ends("a")
    world.after(10.5)
    world.ends("b")
    assert world.core.end is None
    world.after(10.0)
    world.ends("c")
    assert world.core.end is not None and world.core.end.kind is EndKind.GAVE_UP


def test_intensity_zero_restarts_nothing() -> None:
    world = three(intensity=0)
    world.ends("a")
    assert world.core.end is not None and world.core.end.kind is EndKind.GAVE_UP


def test_a_child_that_keeps_dying_waits_longer_each_time() -> None:
    world = World(child("a"), intensity=9, back_off_first_s=0.5, back_off_most_s=15.0).start()
    world.ends("a")
    world.ends("a")
    assert world.took() == ["restarting a in 0", "start a", "restarting a in 0.5"]
    assert world.core.next_deadline() == 0.5
    world.after(0.4)
    assert world.took() == []
    world.after(0.1)
    assert world.took() == ["start a"]
    world.ends("a")
    assert world.took() == ["restarting a in 1"]


def test_a_restart_that_fails_counts_and_does_not_end_the_job_by_itself() -> None:
    world = three(intensity=2)
    world.ends("a")
    world.ends("a", reason="exit 1: port taken")
    assert world.core.end is None
    world.after(0.5)
    world.ends("a", reason="exit 1: port taken")
    assert world.core.end is not None and world.core.end.kind is EndKind.GAVE_UP


# ---- stopping


def test_a_stop_is_in_reverse_order_one_at_a_time() -> None:
    world = three()
    world.stop("enough")
    assert world.took() == ["stopping stopped: enough", "terminate c"]
    world.stops("c")
    world.stops("b")
    world.stops("a")
    assert world.took() == ["terminate b", "terminate a", "ended stopped: enough"]
    assert world.core.end is not None and world.core.end.ok


def test_who_ignores_a_stop_is_killed_after_its_shutdown_time() -> None:
    world = three()
    world.stop()
    world.after(5.0)
    assert world.took()[1:] == ["terminate c", "kill c: did not stop within 5 s"]
    world.ends("c")
    assert world.took() == ["terminate b"]


def test_who_is_not_even_gone_after_a_kill_is_abandoned_so_that_the_stop_ends() -> None:
    world = World(child("a")).start()
    world.stop()
    world.after(5.0)
    world.after(5.0)
    assert world.took()[-2:] == ["abandon a", "ended stopped: enough"]
    world.take(world.core.exited("a", 1, Outcome.ABNORMAL, "killed by SIGKILL", world.now))
    assert world.took() == [], "its late end changes nothing"


def test_a_whole_stop_is_bounded_however_long_each_child_may_take() -> None:
    world = World(*(child(name, shutdown_s=60.0) for name in "abc"), stop_s=20.0).start()
    world.stop()
    world.after(20.0)
    reason = "the stop took longer than 20 s"
    assert world.took()[2:] == [f"kill a: {reason}", f"kill b: {reason}", f"kill c: {reason}"]
    for name in "abc":
        world.ends(name)
    assert world.took() == ["ended stopped: enough"]


def test_a_stop_during_the_start_ends_what_runs_and_starts_nothing() -> None:
    world = World(child("a"), child("b"), child("c")).start(ready=False)
    world.ready("a")
    world.stop()
    world.ready("b")
    world.stops("b")
    world.stops("a")
    assert world.took() == [
        "start b", "stopping stopped: enough", "terminate b", "terminate a", "ended stopped: enough"]


def test_a_stop_during_a_back_off_starts_nothing() -> None:
    world = World(child("a"), intensity=9).start()
    world.ends("a")
    world.ends("a")
    world.stop()
    assert world.took()[-1] == "ended stopped: enough"
    assert world.core.next_deadline() is None


def test_a_stop_before_the_start_ends_at_once_and_a_second_one_changes_nothing() -> None:
    world = World(child("a"))
    world.stop()
    world.stop("again")
    assert world.took() == ["stopping stopped: enough", "ended stopped: enough"]


@pytest.mark.parametrize("restart, outcome, finished", [
    (TRANSIENT, Outcome.NORMAL, True),
    (TRANSIENT, Outcome.ABNORMAL, False),
    (TEMPORARY, Outcome.NORMAL, True),
    (TEMPORARY, Outcome.ABNORMAL, True),
])
def test_a_significant_child_that_ends_by_itself_for_good_finishes_the_job(
        restart: Restart, outcome: Outcome, finished: bool) -> None:
    world = World(child("a"), child("b", restart=restart, significant=True)).start()
    world.ends("b", outcome, "finished")
    assert world.took() == (["stopping finished: b finished", "terminate a"] if finished else
                            ["restarting b in 0", "start b"])


def test_a_significant_child_can_not_be_permanent() -> None:
    with pytest.raises(ValueError, match="transient or temporary"):
        child("a", restart=PERMANENT, significant=True)


# ---- stuck


def test_a_ready_child_without_a_heartbeat_is_killed_and_started_again() -> None:
    world = World(child("a", heartbeat_s=3.0)).start()
    world.core.heartbeat("a", 1, world.now, progress="step 7")
    world.after(2.9)
    assert world.took() == []
    world.after(0.1)
    assert world.took() == ["kill a: stuck: no heartbeat for 3.0 s, last seen at step 7"]
    world.ends("a", reason="stuck")
    assert world.took() == ["restarting a in 0", "start a"]


def test_a_child_that_said_it_is_busy_may_be_silent_for_that_long() -> None:
    world = World(child("a", heartbeat_s=3.0)).start()
    world.core.heartbeat("a", 1, world.now, busy_s=60.0)
    world.after(62.9)
    assert world.took() == []
    world.core.heartbeat("a", 1, world.now)
    world.after(3.0)
    assert world.took() == ["kill a: stuck: no heartbeat for 3.0 s"], "the newest word counts"


def test_a_child_that_is_loading_or_not_watched_needs_no_heartbeat() -> None:
    world = World(child("a"), child("b", heartbeat_s=1.0, start_s=99.0)).start(ready=False)
    world.ready("a")
    world.after(90.0)
    assert world.took() == ["start b"]


def test_silence_while_the_supervisor_itself_slept_is_forgiven() -> None:
    world = World(child("a", heartbeat_s=3.0)).start()
    world.core.forgive(600.0)
    world.after(600.0)
    assert world.took() == []
    world.after(3.0)
    assert world.took() == ["kill a: stuck: no heartbeat for 603.0 s"]


def test_a_child_can_be_killed_for_a_named_reason() -> None:
    world = three()
    world.take(world.core.kill("b", "holds a wrong version", world.now))
    world.ends("b")
    assert world.took() == ["kill b: holds a wrong version", "restarting b in 0", "start b"]
