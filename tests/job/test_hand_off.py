"""A device that policy and rollouts have in turn: never both, whoever dies or hangs in the midst of a hand-over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_actor.actors.context import Context
from cosmos_actor.actors.fleet import StateLost
from cosmos_actor.actors.role import Role, handles
from cosmos_actor.bus.errors import DeadlineExceeded, RemoteError
from cosmos_actor.job import hand_off as module
from cosmos_actor.job.hand_off import side_of
from cosmos_actor.roles.messages import (
    Generation,
    GenerationRequest,
    MendRequest,
    Restored,
    RestoreRequest,
    UpdateReply,
    UpdateRequest,
)
from cosmos_actor.roles.stateful import StatefulRole
from cosmos_actor.roles.turn_messages import ParkRequest, SleepRequest, TurnBegun, TurnOver, UnparkRequest, WakeRequest
from cosmos_actor.roles.turn_taking import TurnOrder
from tests.actors.groups import make_group
from tests.job.small_job import SmallJob, small_job
from tests.waiting import eventually


class Device:
    """Who has memory on it, by incarnation; what happened, in order; and gates that hold answers back."""

    def __init__(self) -> None:
        self.present: dict[str, str] = {}
        self.log: list[str] = []
        self.shut: dict[str, asyncio.Event] = {}
        self.fails: set[str] = set()
        self.both = False

    async def comes(self, actor: str, incarnation: str) -> None:
        self.present[incarnation] = actor
        self.both = self.both or len({name.partition("-")[0] for name in self.present.values()}) > 1

    async def word(self, what: str) -> None:
        self.log.append(what)
        if what in self.shut:
            await self.shut[what].wait()
        if what in self.fails:
            raise MemoryError(what)

    def shut_at(self, what: str) -> None:
        self.shut[what] = asyncio.Event()

    def dies(self, actor: str) -> None:
        """Its process is gone, and its memory with it."""
        self.present = {life: name for life, name in self.present.items() if name != actor}


def played(device: Device) -> dict[str, Any]:
    class Policy(StatefulRole):
        name = "policy"

        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.order = TurnOrder()

        def me(self) -> tuple[str, str]:
            return self.context.identity.actor, self.context.identity.incarnation

        @handles(RestoreRequest)
        async def restore(self, request: RestoreRequest) -> Restored:
            self.begin_life(request.epoch)
            await device.comes(*self.me())
            await device.word("policy restores")
            return Restored("policy", request.step)

        @handles(ParkRequest)
        async def park(self, request: ParkRequest) -> TurnOver:
            self.refuse_another_life(request.epoch)
            self.order.accept(request)
            await device.word("policy parks")
            device.present.pop(self.me()[1], None)
            return TurnOver(0.0, 7, 70)

        @handles(UnparkRequest)
        async def unpark(self, request: UnparkRequest) -> TurnBegun:
            self.refuse_another_life(request.epoch)
            self.order.accept(request)
            await device.comes(*self.me())
            await device.word("policy unparks")
            return TurnBegun(0.0)

        @handles(UpdateRequest)
        async def update(self, request: UpdateRequest) -> UpdateReply:
            assert self.me()[1] in device.present
            await device.word("update")
            return UpdateReply(request.step, {}, 0.0)

    class Rollout(Role):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.order = TurnOrder()

        @handles(WakeRequest)
        async def wake(self, request: WakeRequest) -> TurnBegun:
            self.order.accept(request)
            me = self.context.identity
            await device.comes(me.actor, me.incarnation)
            await device.word(f"{me.actor} wakes {' '.join(request.what)}")
            return TurnBegun(0.0)

        @handles(SleepRequest)
        async def sleep(self, request: SleepRequest) -> TurnOver:
            self.order.accept(request)
            me = self.context.identity
            await device.word(f"{me.actor} sleeps")
            device.present.pop(me.incarnation, None)
            return TurnOver(0.0, 5 if me.actor == "rollout-0" else 3, 50)

        @handles(GenerationRequest, concurrency=4)
        async def generate(self, request: GenerationRequest) -> Generation:
            assert self.context.identity.incarnation in device.present
            await device.word("generate")
            groups = [make_group(group_id=task.group_id, attempt=task.attempt, version=request.version_dispatch)
                      for task in request.tasks]
            return Generation(groups, 0.1, 1, {})

    return {"policy": Policy, "rollout": Rollout}


@pytest.fixture
def device() -> Device:
    return Device()


def turning(folder: Any, device: Device, *flags: str) -> Any:
    return small_job(folder, *flags, takes_turns=True, others=played(device))


@pytest.fixture
def small(tmp_path, device) -> Iterator[SmallJob]:
    with turning(tmp_path, device) as made:
        made.job.restore("the controller started")
        yield made
        assert not device.both


def generate(small: SmallJob, step: int = 1) -> Any:
    job = small.job
    return job.rollout.generate(job.data.tasks(step), step)


def update(small: SmallJob, step: int = 1) -> Any:
    return small.job.call("policy", UpdateRequest(small.job.epoch, step, []), f"policy update {step}")


WAKES = ["rollout-0 wakes weights", "rollout-0 wakes kv_cache"]


def test_the_turns_are_taken_in_order_and_only_when_the_other_side_is_asked(small, device):
    device.log.clear()
    update(small, 1).resolve(10.0)
    generate(small, 1).resolve(10.0)
    generate(small, 2).resolve(10.0)
    update(small, 2).resolve(10.0)
    assert device.log == ["update", "policy parks", *WAKES, "generate", "generate", "rollout-0 sleeps",
                          "policy unparks", "update"]
    assert small.job.journal._highest == {"memory/rollout_peak_bytes": 5, "memory/rollout_used_bytes": 50}
    assert small.job.journal._seconds["hand_off"] > 0


def test_questions_of_both_sides_at_once_come_one_side_after_the_other(small, device):
    asked = [ask(small, step) for step in range(1, 6) for ask in (generate, update)]
    for handle in asked:
        handle.resolve(20.0)
    assert device.log.count("update") == device.log.count("generate") == 5 and not device.both


def test_one_that_comes_in_the_rollouts_turn_is_woken_and_in_the_policys_it_sleeps_on(small, device):
    roles = played(device)
    small.do(small.cluster.add, "rollout-1", roles["rollout"])
    eventually(lambda: "rollout-1" in small.job.fleet.links("rollout"), "the second rollout")
    assert set(device.present.values()) == {"policy-0"}
    generate(small).resolve(10.0)
    assert set(device.present.values()) == {"rollout-0", "rollout-1"}
    small.do(small.cluster.add, "rollout-2", roles["rollout"])
    eventually(lambda: "rollout-2 wakes kv_cache" in device.log, "the third rollout to be woken")
    update(small).resolve(10.0)
    assert set(device.present.values()) == {"policy-0"}


def test_one_that_joined_from_elsewhere_has_no_turns(small, device):
    small.do(lambda: small.cluster.add("rollout-far", played(device)["rollout"], joined=True))
    eventually(lambda: "rollout-far" in small.job.fleet.links("rollout"), "the rollout from elsewhere")
    generate(small)
    eventually(lambda: WAKES[1] in device.log, "the turn of the other")
    update(small).resolve(10.0)
    assert not [word for word in device.log if word.startswith("rollout-far")]


@pytest.mark.parametrize(("gate", "ask", "named"), [
    ("rollout-0 sleeps", update, "rollout-0 to end what is in flight and leave the GPU"),
    ("rollout-0 wakes weights", generate, "rollout-0 to have its weights on the GPU"),
    ("rollout-0 wakes kv_cache", generate, "rollout-0 to have its kv_cache on the GPU"),
    ("policy parks", generate, "the policy to leave the GPU"),
    ("policy unparks", update, "the policy to come back to the GPU"),
])
def test_who_does_not_do_its_part_is_named_before_the_deadline(tmp_path, device, gate, ask, named):
    with turning(tmp_path, device, "run.deadline_s=2") as small:
        small.job.restore("the controller started")
        if ask is update:
            generate(small).resolve(10.0)
        small.do(device.shut_at, gate)
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=named):
            ask(small).resolve()
        assert time.monotonic() - begun < 3.0
        small.do(device.shut[gate].set)


def test_who_is_waited_for_can_be_asked_about(small, device):
    generate(small).resolve(10.0)
    small.do(device.shut_at, "rollout-0 sleeps")
    asked = update(small)
    [fact] = eventually(lambda: [one for one in small.job.questions() if one["at"] == "rollout-0"], "the question")
    assert fact["what"] == "to end what is in flight and leave the GPU" and fact["role"] == "rollout"
    small.do(device.shut["rollout-0 sleeps"].set)
    asked.resolve(10.0)


@pytest.mark.parametrize("gate", ["rollout-0 sleeps", "rollout-0 wakes weights", "rollout-0 wakes kv_cache"])
def test_a_rollout_that_dies_in_its_part_is_not_waited_for_and_its_next_life_is_woken_in_its_turn(small, device, gate):
    if gate.endswith("sleeps"):
        generate(small).resolve(10.0)
    small.do(device.shut_at, gate)
    asked = update(small) if gate.endswith("sleeps") else generate(small)
    eventually(lambda: gate in device.log, gate)
    device.dies("rollout-0")
    small.do(small.cluster.crash, "rollout-0")
    small.do(device.shut.pop, gate)
    small.do(small.cluster.add, "rollout-0", played(device)["rollout"])
    asked.resolve(10.0)
    generate(small, 2).resolve(10.0)
    update(small, 2).resolve(10.0)


@pytest.mark.parametrize("gate", ["policy parks", "policy unparks"])
def test_a_policy_that_dies_in_its_part_takes_the_job_back_and_the_turns_go_on(small, device, gate):
    if gate.endswith("unparks"):
        generate(small).resolve(10.0)
    small.do(device.shut_at, gate)
    asked = update(small) if gate.endswith("unparks") else generate(small)
    eventually(lambda: gate in device.log, gate)
    device.dies("policy-0")
    small.do(small.cluster.crash, "policy-0")
    with pytest.raises(StateLost, match="policy-0 is gone"):
        asked.resolve(10.0)
    small.do(device.shut.pop, gate)
    small.do(small.cluster.add, "policy-0", played(device)["policy"])
    small.job.restore("policy-0 is gone")
    assert set(device.present.values()) == {"policy-0"}
    generate(small, 2).resolve(10.0)
    update(small, 2).resolve(10.0)


def test_before_a_restore_every_rollout_has_left_the_device(small, device):
    generate(small).resolve(10.0)
    assert set(device.present.values()) == {"rollout-0"}
    device.log.clear()
    small.job.restore("replay_buffer-0 is gone")
    assert device.log == ["rollout-0 sleeps", "policy restores"] and set(device.present.values()) == {"policy-0"}
    update(small).resolve(10.0)


def test_a_hand_over_in_the_midst_of_which_the_job_goes_back_has_no_effect_after_it(small, device):
    small.do(device.shut_at, "rollout-0 wakes weights")
    generate(small)
    eventually(lambda: WAKES[0] in device.log, "a hand-over")
    small.do(device.shut.pop("rollout-0 wakes weights").set)
    small.job.restore("replay_buffer-0 is gone")
    update(small).resolve(10.0)
    assert set(device.present.values()) == {"policy-0"}


def test_what_an_engine_can_not_do_ends_the_wait_of_who_asked_with_its_own_words(small, device):
    device.fails.add("rollout-0 wakes weights")
    with pytest.raises(RemoteError, match="rollout-0 wakes weights") as raised:
        generate(small).resolve(10.0)
    assert raised.value.kind == "MemoryError"
    device.fails.clear()
    generate(small, 2).resolve(10.0)


def test_one_that_comes_late_and_can_not_wake_ends_the_wait_of_the_recipe(small, device):
    generate(small).resolve(10.0)
    device.fails.add("rollout-1 wakes weights")
    small.do(small.cluster.add, "rollout-1", played(device)["rollout"])
    eventually(lambda: "rollout-1 wakes weights" in device.log, "the second rollout")
    with pytest.raises(RemoteError, match="rollout-1 wakes weights"):
        for step in range(2, 50):
            small.job.check_interrupted()
            generate(small, step).resolve(10.0)


def test_only_what_needs_the_device_waits_for_a_turn():
    assert side_of("policy", UpdateRequest(0, 1, [])) == "policy"
    assert side_of("policy", MendRequest(0, 1)) is None
    assert side_of("rollout", GenerationRequest([], 0, 0, False, 1.0)) == "rollout"
    assert side_of("reward", object()) is side_of("replay_buffer", RestoreRequest(None, 0, 0)) is None


def test_one_that_only_keeps_silent_is_waited_for_until_its_process_is_gone(small, device, monkeypatch):
    """The head takes it for lost, and its memory is where it was."""
    lives = [True]
    monkeypatch.setattr(module, "os", SimpleNamespace(getpid=lambda: -1))  # here all actors are of one process
    monkeypatch.setattr(module, "process_lives", lambda pid: lives[0])
    generate(small).resolve(10.0)
    small.do(small.cluster.crash, "rollout-0", "no heartbeat for 10 s")
    eventually(lambda: not small.job.fleet.links("rollout"), "the end of its link")
    asked = update(small)
    eventually(lambda: small.job.questions(), "the hand-over to wait for it")
    time.sleep(0.3)
    assert "policy unparks" not in device.log
    device.dies("rollout-0")
    lives[0] = False
    asked.resolve(10.0)
