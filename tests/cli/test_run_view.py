"""The picture of a run that progress, status and report share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cosmos_actor.cli.run_view import RunView, compact, duration, number
from tests.cli.sample_run import event_lines, metrics_lines


def step(number: int, **more: object) -> dict[str, object]:
    return {"step": number, "phase": "grpo", "reward/mean": 0.1 * number, "loss/total": 0.0, "time/step": 2.0, **more}


def evaluation(number: int, accuracy: float) -> dict[str, object]:
    return {"step": number, "phase": "eval", "eval/accuracy": accuracy}


@given(st.lists(st.integers(1, 12), max_size=60))
def test_steps_always_grow_by_step_and_end_with_the_newest(numbers: list[int]) -> None:
    view = RunView()
    view.add_metrics(step(number) for number in numbers)
    kept = [record["step"] for record in view.steps]
    assert kept == sorted(set(kept))
    assert kept[-1:] == numbers[-1:]


def test_a_rewind_forgets_what_lay_behind_it() -> None:
    view = RunView()
    view.add_metrics([evaluation(0, 0.1), step(1), step(2), evaluation(2, 0.4), step(3), evaluation(3, 0.9), step(2)])
    assert [record["step"] for record in view.steps] == [1, 2]
    assert view.evaluations == [(0, 0.1)]


GONE = {"event": "rewind", "reason": "policy-0 is gone"}
BACK = "back to the latest checkpoint: policy-0 is gone"


def test_rewinds_are_counted_from_events_since_the_metrics_forget_them() -> None:
    view = RunView()
    assert view.add_events([GONE]) == [] and view.rewinds == 1
    again = {"event": "restarting", "actor": "policy-0", "reason": "killed by SIGKILL"}
    assert view.add_events([{"event": "exited", "actor": "policy-0", "reason": "killed by SIGKILL"}, again]) == [
        BACK, "policy-0: killed by SIGKILL; starting it again"]
    assert view.rewinds == 1 and view.add_events([again])[0] != BACK


def test_what_the_controller_misses_while_all_are_stopped_is_not_told() -> None:
    view = RunView()
    assert view.add_events([{"event": "stopping", "kind": "stopped", "reason": "reward-0: exit 2"}, GONE, GONE]) == []
    assert view.rewinds == 0
    resumed = [{"event": "started", "actor": "registry-0", "role": "registry"}, GONE]
    assert view.add_events([*resumed, {"event": "ready", "actor": "policy-0"}]) == [BACK]


def test_whom_the_controller_missed_just_before_all_are_stopped_for_it_is_not_told_either() -> None:
    """Its links are closed before its process has ended."""
    view = RunView()
    assert view.add_events([GONE]) == []
    assert view.add_events([{"event": "exited", "actor": "policy-0", "reason": "exit 2: error: no such layer"}]) == []
    assert view.add_events([{"event": "stopping", "kind": "stopped", "reason": "policy-0: exit 2"}, GONE]) == []
    assert view.rewinds == 0


def test_an_evaluation_is_no_step() -> None:
    view = RunView()
    view.add_metrics([step(1), evaluation(1, 0.5)])
    assert len(view.steps) == 1 and view.evaluations == [(1, 0.5)]


def test_a_series_leaves_out_steps_without_a_finite_value() -> None:
    view = RunView()
    view.add_metrics([step(1, lr=1.0), step(2, lr=None), step(3), step(4, lr=2)])
    assert view.series("lr") == [(1, 1.0), (4, 2.0)]
    assert number({"x": True}, "x") is None


def test_the_time_left_follows_the_current_phase() -> None:
    view = RunView()
    assert view.seconds_left(10) is None
    view.add_metrics([{"step": 1, "phase": "sft", "loss/total": 1.0, "time/step": 100.0}])
    assert view.seconds_left(3) == 200.0
    view.add_metrics([step(2), step(3)])
    assert view.seconds_left(13) == 20.0


def test_events_tell_who_lives_and_why_who_died() -> None:
    view = RunView()
    lines = view.add_events(event_lines())
    assert lines == ["rollout-0: killed by SIGKILL; starting it again"]
    assert (view.alive, view.restarts) == (7, 1)
    rollout = view.actors["rollout-0"]
    assert (rollout.role, rollout.pid, rollout.state, rollout.last_reason) == (
        "rollout", 4_000_100, "ready", "killed by SIGKILL")
    assert view.actors["replay_buffer-0"].role == "replay_buffer"


def test_an_actor_that_joined_and_left_is_told() -> None:
    view = RunView()
    lines = view.add_events([
        {"event": "joined", "actor": "rollout-9", "pid": 7, "interpreter": "py", "host": "far"},
        {"event": "departed", "actor": "rollout-9", "reason": "asked by a signal"},
        {"event": "stopping", "kind": "stopped", "reason": "SIGTERM"}, {"event": "keeper_replaced", "pid": 3},
        {"event": "stopping", "kind": "gave_up", "reason": "gave up: 11 restarts"}])
    assert lines == ["rollout-9 joined from far", "rollout-9 left: asked by a signal", "gave up: 11 restarts"]


def test_numbers_for_people() -> None:
    assert [duration(value) for value in (None, 0, 61, 3723)] == ["–", "0:00", "1:01", "1:02:03"]
    assert [compact(value) for value in (None, 0.0, 0.12345, 123.4, 0.00001, 45678.0)] == [
        "–", "0.000", "0.123", "123", "1.0e-05", "45.7k"]


def test_the_sample_is_read_whole() -> None:
    view = RunView()
    view.add_metrics(metrics_lines())
    assert (len(view.steps), len(view.evaluations), view.rewinds) == (120, 4, 0)


def test_a_stuck_actor_is_stuck_until_it_goes_on_or_ends() -> None:
    who = {"actor": "rollout-0", "incarnation": "a"}
    stuck = {"event": "stuck", **who, "kind": "silent", "reason": "no heartbeat for 2.6 s"}
    view = RunView()
    assert view.add_events([stuck]) == ["rollout-0 is stuck: no heartbeat for 2.6 s"]
    assert view.actors["rollout-0"].stuck == "no heartbeat for 2.6 s"
    assert view.add_events([{"event": "goes_on", **who, "after_s": 1.0}]) == ["rollout-0 goes on"]
    assert view.actors["rollout-0"].stuck == ""
    view.add_events([stuck, {"event": "exited", **who, "reason": "killed by SIGKILL"}])
    assert view.actors["rollout-0"].stuck == ""


def test_a_standstill_is_a_line_with_its_cause() -> None:
    line = {"event": "standstill", "for_s": 120.3, "why": "rollout-0 does not run", "stacks": ["logs/a.txt"]}
    assert RunView().add_events([line]) == ["nothing got done for 120 s: rollout-0 does not run; stacks in logs/"]


def test_the_registry_is_no_actor_that_takes_part() -> None:
    view = RunView()
    view.add_events([{"event": "started", "actor": actor, "incarnation": "1-a", "pid": 1, "role": actor[:-2]}
                     for actor in ("registry-0", "policy-0", "rollout-0")])
    assert set(view.actors) == {"registry-0", "policy-0", "rollout-0"} and view.alive == 2


def test_a_simulator_that_comes_by_hand_is_an_actor_and_one_that_is_back_is_not_stuck() -> None:
    view = RunView()
    told = view.add_events([
        {"event": "started", "actor": "simulator-0", "incarnation": "1-aa", "pid": 7, "role": "simulator"},
        {"event": "simulator_attached", "simulator": "simulator-0", "pid": 7, "host": "here", "python": "3.11.7"},
        {"event": "simulator_attached", "simulator": "bench", "pid": 8, "host": "there", "python": "3.8.18"},
        {"event": "stuck", "actor": "simulator-0", "reason": "no heartbeat for 3.1 s"},
        {"event": "simulator_gone", "simulator": "simulator-0", "text": "no heartbeat for 5.0 s"},
        {"event": "simulator_failed", "simulator": "simulator-0 (kind)", "text": "lost", "kind": "lost"},
        {"event": "simulator_refused", "simulator": "other", "text": "this run is about CartPole"},
        {"event": "simulator_gone", "simulator": "bench", "text": "it left: asked by SIGINT"}])
    assert told == ["bench attached from there", "simulator-0 is stuck: no heartbeat for 3.1 s",
                    "simulator-0 is gone: no heartbeat for 5.0 s", "other is refused: this run is about CartPole",
                    "bench is gone: it left: asked by SIGINT"]
    ours, bench = view.actors["simulator-0"], view.actors["bench"]
    assert (ours.stuck, ours.state, bench.state, bench.interpreter) == ("", "starting", "exited", "Python 3.8.18")
    assert set(view.actors) == {"simulator-0", "bench"}


def test_what_a_sink_misses_is_a_line_for_a_person() -> None:
    assert RunView().add_events([
        {"event": "sink_trouble", "sink": "my_lab:returns", "reason": "failed", "text": "it can not be made: OSError"},
        {"event": "sink_lost", "sink": "my_lab:returns", "text": "of 5 episodes it did not get: 5 failed", "failed": 5},
    ]) == ["sink my_lab:returns: it can not be made: OSError",
           "sink my_lab:returns: of 5 episodes it did not get: 5 failed"]
