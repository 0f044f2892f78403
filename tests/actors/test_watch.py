"""Who is stuck, by what is seen and a clock that the test turns."""

from __future__ import annotations

from typing import Any

from cosmos_actor.actors.watch import (
    BLOCKED,
    ENDLESS,
    SILENT,
    GoesOn,
    KillStuck,
    Sight,
    Standstill,
    Stuck,
    Watch,
    sight_of,
)


def watch(*, kill: bool = False) -> Watch:
    return Watch(0.0, stuck_s=2.5, endless_s=60.0, no_progress_s=120.0, kill=kill)


def seen(**facts: Any) -> Sight:
    return Sight(**{"actor": "rollout-0", "incarnation": "1-a", "doing": "generate", **facts})


def moving(now: float, **facts: Any) -> Sight:
    return seen(progress=int(now * 100), **facts)


def look_every_quarter(guard: Watch, begin: float, end: float, sight: Any) -> list[Any]:
    """(time, finding) of looks four times a second; `sight(now)` is what is seen."""
    times = [number / 4 for number in range(int(begin * 4), int(end * 4) + 1)]
    return [(now, finding) for now in times for finding in guard.look(now, [sight(now)])]


def test_a_silent_process_is_reported_once_and_within_three_seconds():
    findings = look_every_quarter(watch(), 0.25, 20.0, lambda now: seen(silent_s=now))
    assert [(now, type(finding), finding.kind) for now, finding in findings] == [(2.5, Stuck, SILENT)]
    assert findings[0][1].reason == "no heartbeat for 2.5 s, last seen at generate"


def test_a_blocked_handler_is_reported_once_and_by_name():
    findings = look_every_quarter(watch(), 0.25, 20.0, lambda now: seen(still_s=now, blocked=now >= 2.5))
    assert [(now, finding.kind) for now, finding in findings] == [(2.5, BLOCKED)]
    assert "generate makes no progress for 2.5 s and uses no CPU" in findings[0][1].reason


def test_a_long_computation_is_no_finding_before_endless_s():
    findings = look_every_quarter(watch(), 0.25, 70.0, lambda now: seen(still_s=now))
    assert [(now, finding.kind) for now, finding in findings] == [(60.0, ENDLESS)]


def test_whoever_gets_on_is_reported_too():
    guard = watch()
    guard.look(1.0, [seen(silent_s=2.6)])
    assert guard.look(1.5, [seen(silent_s=3.1)]) == []
    assert guard.look(1.75, [seen(silent_s=0.1)]) == [GoesOn("rollout-0", "1-a", 0.75)]
    assert guard.stuck == {}


def test_in_a_declared_pause_nobody_is_stuck_whatever_is_seen():
    everything = {"silent_s": 100.0, "still_s": 100.0, "blocked": True, "paused": True}
    assert look_every_quarter(watch(kill=True), 0.25, 300.0, lambda now: seen(**everything)) == []


def test_one_that_is_being_set_up_may_be_silent_for_longer_and_is_not_blocked():
    findings = look_every_quarter(
        watch(), 0.25, 20.0, lambda now: seen(ready=False, silent_s=now, still_s=now, blocked=True))
    assert [(now, finding.kind) for now, finding in findings] == [(7.5, SILENT)]


def test_nobody_is_killed_unless_that_is_asked_for():
    findings = look_every_quarter(watch(), 0.25, 110.0, lambda now: moving(now, still_s=now, blocked=True))
    assert [type(finding) for _, finding in findings] == [Stuck]


def test_where_it_is_asked_for_a_blocked_or_endless_one_is_killed_once_after_endless_s():
    for blocked in (True, False):
        findings = look_every_quarter(
            watch(kill=True), 0.25, 110.0, lambda now, blocked=blocked: moving(now, still_s=now, blocked=blocked))
        kills = [(now, finding) for now, finding in findings if isinstance(finding, KillStuck)]
        assert [(now, kill.actor) for now, kill in kills] == [(60.0, "rollout-0")]
        assert kills[0][1].reason.startswith("stuck: generate makes no progress for 60.0 s")


def test_silence_alone_is_the_supervisors_to_kill():
    findings = look_every_quarter(watch(kill=True), 0.25, 110.0, lambda now: moving(now, still_s=now, silent_s=now))
    assert [type(finding) for _, finding in findings] == [Stuck]


def test_a_new_life_starts_unsuspected():
    guard = watch(kill=True)
    guard.look(61.0, [seen(still_s=61.0, blocked=True)])
    assert guard.look(61.25, [seen(incarnation="2-b")]) == []
    assert [type(finding) for finding in guard.look(130.0, [seen(incarnation="2-b", still_s=61.0)])] == [
        Stuck, KillStuck]


def test_a_job_in_which_nothing_gets_done_is_a_standstill_once_until_it_moves_again():
    findings = look_every_quarter(watch(), 0.25, 400.0, lambda now: seen(progress=int(now > 200)))
    assert [(now, type(finding)) for now, finding in findings] == [(120.25, Standstill), (320.25, Standstill)]


def test_a_declared_pause_anywhere_is_no_standstill():
    assert look_every_quarter(watch(), 0.25, 400.0, lambda now: seen(paused=True)) == []


def test_time_in_which_nobody_looked_does_not_count():
    guard = watch()
    guard.look(0.25, [seen()])
    assert guard.look(500.0, [seen()]) == []
    assert guard.still_for_s(500.0) < 1.0


def test_a_declared_pause_runs_out_also_when_the_actor_says_no_more():
    told = {"pause": {"what": "a checkpoint", "left_s": 10.0}}
    entry = {"actor": "policy-0", "incarnation": "1-a", "state": "ready", "statistics": told}
    assert [sight_of({**entry, "status_s": age}).paused for age in (1.0, 9.0, 11.0)] == [True, True, False]


def test_who_is_silent_for_how_long_is_known():
    guard = watch()
    guard.look(5.0, [seen(silent_s=2.6), seen(actor="reward-0", still_s=3.0, blocked=True)])
    assert guard.silent_for(3.0, 7.9) == set()
    assert guard.silent_for(3.0, 8.0) == {"rollout-0"}
