"""Facts of a run in, likely causes, cycles and lines out."""

from __future__ import annotations

from typing import Any

from cosmos_actor.actors.wait_graph import graph_of, lines, one_line


def member(actor: str, state: str = "ready", silent_s: float = 0.2, **statistics: Any) -> dict[str, Any]:
    return {"actor": actor, "role": actor.rpartition("-")[0], "incarnation": f"1-{actor}", "pid": 4711, "state": state,
            "silent_s": silent_s, "statistics": statistics}


def asked(what: str, at: str, *, role: str = "", count: int = 1, for_s: float = 41.0) -> dict[str, Any]:
    return {"what": what, "role": role or at.rpartition("-")[0], "at": at, "count": count, "for_s": for_s}


def waiting_controller(*questions: dict[str, Any], what: str = "samples of step 17") -> dict[str, Any]:
    return member("controller-0", waits=[{"what": what, "on": "", "for_s": 41.0}], questions=list(questions),
                  idle_s=90.0)


def computing(what: str, for_s: float, *, still_s: float | None = None) -> dict[str, Any]:
    return {"what": what, "for_s": for_s, "still_s": for_s if still_s is None else still_s, "blocked_s": 0.0}


def graph(*members: dict[str, Any], children: list[dict[str, Any]] | None = None):
    return graph_of({"members": list(members), "children": children or [], "stuck_s": 2.5})


def child(actor: str, state: str, **facts: Any) -> dict[str, Any]:
    return {"actor": actor, "role": actor.rpartition("-")[0], "state": state, "pid": 12, **facts}


def test_the_longest_wait_names_where_its_questions_are_and_how_those_actors_stand():
    made = graph(
        waiting_controller(asked("4 prompts of step 17", "rollout-2", count=3),
                           asked("4 prompts of step 17", "rollout-0", count=5, for_s=2.0)),
        member("rollout-0", computing=computing("generate", 2.0, still_s=0.1)),
        member("rollout-2", silent_s=40.0, computing=computing("generate", 50.0)),
        member("policy-0", idle_s=41.0))
    text = lines(made)
    assert text[0] == "likely cause"
    assert text[1].startswith("  rollout-2 gave no heartbeat for 40 s, last seen at generate")
    assert text[1].endswith("waited for by controller-0, policy-0")
    [line] = [line for line in text if line.startswith("  controller-0 waits")]
    assert line.startswith("  controller-0 waits 41 s for samples of step 17: 3 of 8: 4 prompts of step 17 at "
                           "rollout-2 for 41 s, which gave no heartbeat for 40 s")
    assert "5 of 8: 4 prompts of step 17 at rollout-0 for 2.0 s, which computes generate for 2.0 s" in line
    assert text[-1] == "  nothing to do: policy-0 (41 s)"


def test_those_that_wait_for_nobody_are_the_causes_the_worst_first():
    made = graph(
        waiting_controller(asked("a", "rollout-0"), asked("b", "reward-0"), asked("c", "data-0")),
        member("rollout-0", computing=computing("generate", 5.0)),
        member("reward-0", computing=computing("score", 30.0), blocked=True),
        member("data-0", silent_s=12.0),
        member("policy-0", idle_s=4.0))
    assert [(node.actor, node.standing) for node in made.causes()] == [
        ("data-0", "silent"), ("reward-0", "blocked"), ("rollout-0", "computing")]
    assert made.cycles() == []


def test_a_busy_actor_that_nobody_waits_for_is_no_cause_but_a_stuck_one_is():
    made = graph(waiting_controller(asked("a", "policy-0")), member("policy-0", computing=computing("update", 3.0)),
                 member("rollout-0", computing=computing("generate", 9.0)),
                 member("rollout-1", computing=computing("generate", 9.0), blocked=True))
    assert [node.actor for node in made.causes()] == ["rollout-1", "policy-0"]


def test_a_dead_actor_is_named_with_why_it_died_and_who_waits_for_it():
    made = graph(waiting_controller(asked("policy update 12", "", role="policy"), what="policy update 12"),
                 children=[child("controller-0", "ready"), child("policy-0", "waiting", lost="killed by SIGKILL")])
    assert lines(made) == [
        "likely cause", "  policy-0 does not run: killed by SIGKILL; it is waiting - waited for by controller-0",
        "who waits", "  controller-0 waits 41 s for policy update 12: no actor of role policy is free"]


def test_an_actor_that_the_head_gave_up_is_lost_and_its_process_is_described():
    made = graph(children=[child("rollout-0", "ready", lost="no frame for 10.1 s", process="stopped by a signal")])
    assert lines(made) == ["likely cause",
                           "  rollout-0 is lost to the run: no frame for 10.1 s; process 12 is stopped by a signal"]


def test_actors_whose_handlers_call_each_other_are_a_cycle_and_named():
    def caller(actor: str, other: str, for_s: float) -> dict[str, Any]:
        return member(actor, messages=[{"what": "ask", "of": other, "for_s": for_s}], under_way=[
            {"on": other, "channel": "call", "message": "ask", "count": 1, "for_s": for_s, "up": True}])

    made = graph(caller("a-0", "b-0", 20.0), caller("b-0", "c-0", 19.0), caller("c-0", "a-0", 18.0))
    assert made.cycles() == [["a-0", "b-0", "c-0", "a-0"]]
    assert made.causes() == []
    assert lines(made)[:2] == [
        "cycle", "  a-0 -> b-0 -> c-0 -> a-0 (a-0 waits 20 s for ask of b-0, b-0 waits 19 s for ask of c-0, "
        "c-0 waits 18 s for ask of a-0)"]
    assert one_line(made).startswith("a-0 -> b-0 -> c-0 -> a-0")


def test_work_that_its_receiver_does_not_have_is_a_cycle_through_an_idle_actor():
    made = graph(waiting_controller(asked("rewards", "reward-0")), member("reward-0", idle_s=41.0))
    assert made.cycles() == [["controller-0", "reward-0", "controller-0"]]
    assert "reward-0 has nothing in hand, so what was sent to it is on its way or lost" in lines(made)[1]


def test_a_message_that_is_just_on_its_way_is_no_cycle():
    made = graph(waiting_controller(asked("rewards", "reward-0", for_s=0.3)), member("reward-0", idle_s=41.0))
    assert made.cycles() == []


def test_an_actor_that_waits_for_weights_waits_for_who_brings_them():
    made = graph(
        waiting_controller(asked("4 prompts", "rollout-0")),
        member("rollout-0", messages=[{"what": "generation_request", "of": "controller-0", "for_s": 41.0}],
               waits=[{"what": "weights 16", "on": "policy", "for_s": 40.0}]),
        member("policy-0", computing=computing("update", 39.0, still_s=1.0)))
    assert [node.actor for node in made.causes()] == ["policy-0"]
    assert made.waiters_of("policy-0") == ["controller-0", "rollout-0"]
    assert ("  rollout-0 waits 41 s (generation_request of controller-0): weights 16 at policy-0 for 40 s, which "
            "computes update for 39 s, last progress 1.0 s ago") in lines(made)


def test_an_actor_in_a_declared_pause_is_named_as_such():
    made = graph(waiting_controller(asked("save", "policy-0")), member(
        "policy-0", computing=computing("save", 5.0), pause={"what": "a checkpoint", "left_s": 55.0}))
    assert "  policy-0 is in a declared pause for a checkpoint, 55 s left - waited for by controller-0" in lines(made)


def test_a_recipe_that_asks_nobody_computes_itself():
    made = graph(member("controller-0", idle_s=50.0), member("policy-0", idle_s=30.0))
    assert [node.actor for node in made.causes()] == ["controller-0"]
    assert "its recipe computes, or sits in a debugger" in lines(made)[1]


def test_while_everybody_starts_each_is_named():
    made = graph(member("policy-0", state="starting", computing=computing("setup", 30.0)),
                 children=[child("rollout-0", "starting")])
    assert lines(made) == ["nobody waits", "  policy-0 is not ready: it computes setup for 30 s",
                           "  rollout-0 is being started"]


def test_a_question_without_anybody_to_ask_says_so():
    made = graph(waiting_controller(asked("2 ready actors of role rollout", "", role="rollout"), what="2 rollouts"),
                 member("rollout-0", state="starting", computing=computing("setup", 30.0)))
    assert lines(made)[-1] == ("  controller-0 waits 41 s for 2 rollouts: 2 ready actors of role rollout (no actor of "
                               "role rollout is free)")
    assert [node.actor for node in made.causes()] == ["rollout-0"]


def test_a_run_without_anybody_is_a_line():
    assert lines(graph()) == ["nobody waits"]
    assert one_line(graph()) == "nobody waits for anybody"
