"""The supervisor with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from cosmos_actor.actors.child_spec import ChildSpec
from cosmos_actor.actors.decisions import EndKind
from cosmos_actor.actors.errors import JobFailed, NotFound
from cosmos_actor.actors.json_lines import read_json_lines
from cosmos_actor.actors.keeper import belonging, memory_prefix
from cosmos_actor.actors.restart_policy import Restart, RestartLimits
from tests.actors.supervised import MEMORY, SLEEPER, STUBBORN, Job, python
from tests.interpreters import require_python
from tests.leaks import MARK
from tests.waiting import stop

CRASH = "raise ValueError('no model in /models/x')"
LEAVE_LEFTOVERS = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 600 & exit"]).wait()
print("spawned", flush=True)
time.sleep(600)
"""
BEATING = """
import time
while True:
    print("beat", flush=True)
    time.sleep(0.05)
"""


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100.0))


def processes() -> set[int]:
    return belonging(MARK)


# ---- ends and restarts


def test_a_killed_child_is_known_within_100_ms_and_started_again_with_a_reason(tmp_path: Path) -> None:
    async def test() -> None:
        known_after_s = []
        async with Job(tmp_path, python(SLEEPER), limits=RestartLimits(back_off_first_s=0.01)) as job:
            for life in (1, 2, 3):
                started = await job.event("started", count=life)
                os.kill(started["pid"], signal.SIGKILL)
                killed_at = time.monotonic()
                exited = await job.event("exited", count=life)
                known_after_s.append(job.seen_at[job.events.index(exited)] - killed_at)
                assert exited["reason"] == "killed by SIGKILL" and exited["incarnation"] == started["incarnation"]
                assert (exited["exit_code"], exited["signal"], exited["outcome"]) == (None, "SIGKILL", "abnormal")
            await job.event("ready", count=4)
            assert [event["delay_s"] for event in job.of("restarting")] == [0.0, 0.01, 0.02]
        assert min(known_after_s) < 0.1, known_after_s
        assert len({event["incarnation"] for event in job.of("started")}) == 4
        assert read_json_lines(job.directory.events) == job.events

    run(test)


def test_an_exit_carries_its_code_and_the_error_from_the_log(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python("import sys; sys.stderr.write('error: disk full\\n'); sys.exit(7)",
                                        restart=Restart.TEMPORARY)) as job:
            exited = await job.event("exited")
            assert (exited["reason"], exited["exit_code"]) == ("exit 7: error: disk full", 7)
            assert exited["uptime_s"] >= 0

    run(test)


def test_too_many_restarts_end_the_supervisor_and_stop_everything(tmp_path: Path) -> None:
    async def test() -> None:
        limits = RestartLimits(intensity=2, back_off_first_s=0.01)
        async with Job(tmp_path, python(SLEEPER, "data-0"), python(CRASH, "policy-0"), limits=limits) as job:
            end = await job.supervisor.wait()
            assert end.kind is EndKind.GAVE_UP and not end.ok
            assert end.reason == ("gave up: 3 restarts within 120 s, more than 2; the last: policy-0 exit 1: "
                                  "ValueError: no model in /models/x")
            assert not processes()
        assert job.of("exited", "data-0")[0]["reason"] == "stopped"
        assert job.of("stopping")[0]["kind"] == "gave_up" and job.events[-1]["event"] == "ended"

    run(test)


def test_a_child_that_fails_at_the_first_start_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(CRASH, "policy-0"), ready=lambda actor: False) as job:
            with pytest.raises(JobFailed) as caught:
                await job.supervisor.until_ready()
            assert str(caught.value) == "policy-0 failed to start: exit 1: ValueError: no model in /models/x"

    run(test)


def test_a_child_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    async def test() -> None:
        specs = python(SLEEPER, "data-0"), python(SLEEPER, "policy-0", start_s=0.3), python(SLEEPER, "reward-0")
        async with Job(tmp_path, *specs, ready=lambda actor: actor == "data-0") as job:
            with pytest.raises(JobFailed, match="policy-0 failed to start: not ready 0.3 s after its start"):
                await job.supervisor.until_ready()
            assert job.of("exited", "policy-0")[0]["reason"] == "not ready 0.3 s after its start"
            assert not job.of("started", "reward-0")

    run(test)


def test_a_stopped_process_is_found_by_its_missing_heartbeat_and_killed_with_a_reason(tmp_path: Path) -> None:
    async def beat(job: Job) -> None:
        """What the bus does in a job: pass the child's signs of life on."""
        started = await job.event("started")
        log, size = job.directory.log("rollout-0", started["incarnation"]), 0
        while True:
            if log.stat().st_size > size:
                size = log.stat().st_size
                job.supervisor.heartbeat("rollout-0", started["incarnation"], progress="batch 3")
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with Job(tmp_path, python(BEATING, "rollout-0", heartbeat_s=1.0)) as job:
            beating = asyncio.create_task(beat(job))
            await job.logged("rollout-0", "beat\n" * 25)
            assert not job.of("exited"), "beats keep it alive for longer than its heartbeat_s"
            stop(job.of("started")[0]["pid"])
            exited = await job.event("exited")
            assert exited["reason"].startswith("stuck: no heartbeat for 1.")
            assert exited["reason"].endswith("last seen at batch 3") and exited["signal"] == "SIGKILL"
            beating.cancel()
            await job.event("ready", count=2)

    run(test)


def test_what_a_killed_child_had_started_is_gone_before_it_starts_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(LEAVE_LEFTOVERS)) as job:
            await job.logged("worker-0", "spawned")
            before = processes()
            os.kill(job.of("started")[0]["pid"], signal.SIGKILL)
            await job.event("started", count=2)
            assert len(job.of("leftovers")[0]["pids"]) == 2, "both had left the child's session"
            assert before & processes() == {job.supervisor._keeper.pid}
            await job.logged("worker-0", "spawned", life=2)
        assert not processes(), "an orderly stop ends them too"

    run(test)


def test_shared_memory_that_a_killed_child_had_made_is_gone_before_it_starts_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(MEMORY)) as job:
            made = set((await job.logged("worker-0", "\n")).split()[1:])
            first = job.of("started")[0]
            prefix = memory_prefix(job.supervisor._pipe.supervisor, first["incarnation"])
            assert len(made) == 3 and made <= set(os.listdir("/dev/shm"))
            assert sorted(prefix in name for name in made) == [False, True, True]
            os.kill(first["pid"], signal.SIGKILL)
            await job.event("started", count=2)
            assert not made & set(os.listdir("/dev/shm"))
            made = set((await job.logged("worker-0", "\n", life=2)).split()[1:])
            assert made <= set(os.listdir("/dev/shm"))
        assert not made & set(os.listdir("/dev/shm")), "an orderly stop takes it away too"

    run(test)


# ---- order and stop


def test_children_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, *(python(SLEEPER, f"{name}-0") for name in "abc")) as job:
            await job.supervisor.until_ready()
            await job.logged("c-0", "here")
        assert job.order("started", "ready") == [f"{what} {name}-0" for name in "abc" for what in ("started", "ready")]
        assert job.order("exited") == ["exited c-0", "exited b-0", "exited a-0"]
        assert {event["reason"] for event in job.of("exited")} == {"stopped"}

    run(test)


def test_a_child_that_ignores_sigterm_is_killed_in_bounded_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(STUBBORN, shutdown_s=0.4)) as job:
            await job.logged("worker-0", "here")
            began = time.monotonic()
            end = await job.supervisor.stop("enough")
            assert 0.4 <= time.monotonic() - began < 3.0
            assert (end.kind, end.reason) == (EndKind.STOPPED, "enough")
            exited = job.of("exited")[0]
            assert (exited["reason"], exited["outcome"]) == ("did not stop within 0.4 s", "shutdown")
            assert not processes()

    run(test)


def test_a_significant_child_that_finishes_ends_the_job_well(tmp_path: Path) -> None:
    async def test() -> None:
        controller = python("print('all steps done')", "controller-0", restart=Restart.TRANSIENT, significant=True)
        async with Job(tmp_path, python(SLEEPER, "data-0"), controller) as job:
            end = await job.supervisor.wait()
            assert end.ok and end.reason == "controller-0 finished"
            assert not processes()

    run(test)


def test_children_come_and_go_while_the_job_runs(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(SLEEPER, "data-0")) as job:
            await job.supervisor.until_ready()
            job.supervisor.add(python(SLEEPER, "rollout-7"))
            await job.event("ready", "rollout-7")
            assert [child["state"] for child in job.supervisor.children()] == ["ready", "ready"]
            job.supervisor.remove("rollout-7")
            await job.event("exited", "rollout-7")
            job.supervisor.kill("data-0", "holds a wrong version")
            assert (await job.event("exited", "data-0"))["reason"] == "holds a wrong version"
            await job.event("ready", "data-0", count=2)
            assert [child["actor"] for child in job.supervisor.children()] == ["data-0"]

    run(test)


# ---- what a child gets


def test_each_life_has_its_own_log_and_standard_input_is_empty(tmp_path: Path) -> None:
    code = ("import os, sys; "
            "print('life', os.environ['COSMOS_ACTOR_INCARNATION'], repr(sys.stdin.read()), os.environ['X'])")

    async def test() -> None:
        limits = RestartLimits(intensity=1)
        async with Job(tmp_path, python(code, "reward-0", env={"X": "from the spec"}), limits=limits) as job:
            await job.supervisor.wait()
        first, second = job.of("started")
        assert [log.read_text() for log in job.directory.logs_of("reward-0")] == [
            f"life {event['incarnation']} '' from the spec\n" for event in (first, second)]
        assert job.directory.log("reward-0", first["incarnation"]).parent == job.directory.logs / "reward-0"

    run(test)


HELD = "import sys; print(sys.stdin.readline(), end='', flush=True); sys.stdin.read(); print('it is over', flush=True)"


def test_standard_input_that_is_held_open_ends_when_the_child_is_to_stop(tmp_path: Path) -> None:
    """A launcher's child elsewhere hears of nothing else: a SIGTERM would only end the launcher."""

    async def test() -> None:
        spec = python(HELD, "simulator-0", stdin=lambda incarnation: f"you are {incarnation}\n".encode())
        async with Job(tmp_path, spec) as job:
            started = await job.event("started")
            await job.logged("simulator-0", f"you are {started['incarnation']}\n")
            job.supervisor.remove("simulator-0")
            assert (await job.event("exited"))["exit_code"] == 0
            assert "it is over" in await job.logged("simulator-0", "\n")

    run(test)


def test_what_does_not_fit_into_a_pipe_is_no_standard_input(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(HELD, stdin=lambda incarnation: bytes(1 << 20))) as job:
            with pytest.raises(JobFailed, match="could not start: Argument list too long: standard input"):
                await job.supervisor.until_ready()

    run(test)


def test_a_child_may_run_on_another_python_and_dies_with_the_job_all_the_same(tmp_path: Path) -> None:
    python38 = require_python("3.8")
    code = "import sys; from cosmos_actor import death; print(sys.version_info[:2], death.install(), flush=True); " \
           "import time; time.sleep(600)"

    async def test() -> None:
        async with Job(tmp_path, python(code, "simulator-0", interpreter=python38)) as job:
            assert (await job.logged("simulator-0", "\n")) == "(3, 8) True\n"
            assert job.of("started")[0]["interpreter"] == python38

    run(test)


def test_a_missing_interpreter_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    async def test() -> None:
        job = Job(tmp_path, python(SLEEPER, "data-0"), python(SLEEPER, "simulator-0", interpreter="/opt/libero/python"))
        with pytest.raises(NotFound) as caught:
            await job.supervisor.start()
        assert str(caught.value) == "simulator-0: there is no program /opt/libero/python (setting `simulator.python`)"
        assert not job.events and not processes()
        job.directory.close()

    run(test)


def test_what_the_system_can_not_execute_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and nothing else")
    program.chmod(0o755)

    async def test() -> None:
        async with Job(tmp_path, ChildSpec(actor="odd-0", role="odd", command=(str(program),))) as job:
            with pytest.raises(JobFailed, match=f"could not start: Exec format error: {program}"):
                await job.supervisor.until_ready()

    run(test)


# ---- the supervisor's own


def test_a_killed_keeper_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(SLEEPER)) as job:
            killed = job.supervisor._keeper.pid
            os.kill(killed, signal.SIGKILL)
            assert (await job.event("keeper_replaced"))["pid"] != killed

    run(test)


def test_after_a_sleep_of_the_machine_children_are_not_taken_for_stuck(tmp_path: Path) -> None:
    slept_s = 0.0

    async def test() -> None:
        nonlocal slept_s
        async with Job(tmp_path, python(SLEEPER, heartbeat_s=5.0), clock=lambda: time.monotonic() + slept_s) as job:
            await job.supervisor.until_ready()
            slept_s = 600.0
            job.supervisor._tick()
            assert not job.of("killing")

    run(test)


def test_a_word_of_a_life_that_is_over_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(SLEEPER), ready=lambda actor: False) as job:
            first = await job.event("started")
            job.supervisor.mark_ready("worker-0", "1-somebody-else")
            job.supervisor.heartbeat("worker-9", first["incarnation"])
            assert not job.of("ready") and job.supervisor.statistics()["stale_words"] == 2
            job.supervisor.mark_ready("worker-0", first["incarnation"])
            job.supervisor.mark_ready("worker-0", first["incarnation"])
            assert len(job.of("ready")) == 1

    run(test)


@pytest.mark.parametrize("where", ["exited", "tick"])
def test_a_fault_of_the_supervisor_itself_ends_the_job_and_is_raised(
        where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        specs = python(SLEEPER, "data-0"), python(SLEEPER, start_s=0.2)
        job = Job(tmp_path, *specs, ready=lambda actor: actor == "data-0")
        monkeypatch.setattr(job.supervisor._core, where, lambda *_: 1 / 0)
        await job.supervisor.start()
        with pytest.raises(ZeroDivisionError):
            await job.supervisor.wait()
        assert not processes()
        with pytest.raises(ZeroDivisionError):
            await job.supervisor.stop("enough")
        job.directory.close()

    run(test)


def test_the_children_s_command_lines_name_their_interpreters(tmp_path: Path) -> None:
    async def test() -> None:
        async with Job(tmp_path, python(SLEEPER)) as job:
            await job.logged("worker-0", "here")
            (child,) = job.supervisor.children()
            assert child["interpreter"] == sys.executable and child["starts"] == 1
            assert Path(f"/proc/{child['pid']}/cmdline").read_bytes().startswith(sys.executable.encode())

    run(test)
