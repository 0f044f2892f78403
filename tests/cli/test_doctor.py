"""Each cause that `doctor` names, made to happen: by real sockets and real heads, named within 5 s."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cosmos_actor.cli.examination.handshake  # noqa: F401  (loading it is Python's time, not the command's)
from cosmos_actor.actors.messages import Announce
from cosmos_actor.bus import KeyRing, envelope, known_schemas
from cosmos_actor.bus.greeting import Greeting
from cosmos_actor.cli.examination import causes
from cosmos_actor.cli.examination.reach import judge_greeting
from tests.bus import strangers
from tests.cli import heads
from tests.cli.conftest import Answer, Cli
from tests.cli.sample_run import make_run
from tests.netns import skip_reason, two_hosts
from tests.waiting import eventually

NAMED_WITHIN_S = 5.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return heads.make_keys(tmp_path / "keys")


class Asked:
    """What `doctor` said, as data."""

    def __init__(self, answer: Answer) -> None:
        self.code = answer.code
        said = json.loads(answer.out)
        self.lines = {line["what"]: line for line in said["lines"]}
        self.last = said["lines"][-1]
        self.seconds: float = said["seconds"]
        assert said["exit_code"] == self.code and said["ok"] == (self.code == 0)


@pytest.fixture
def ask(cli: Cli, record_property: Callable[[str, object], None]) -> Callable[..., Asked]:
    """Run `doctor --json`; whatever it says, it says in time."""

    def ask(*arguments: object) -> Asked:
        asked = Asked(cli("doctor", *map(str, arguments), "--json"))
        record_property("seconds", asked.seconds)
        assert asked.seconds < NAMED_WITHIN_S
        return asked

    return ask


Ask = Callable[..., Asked]


def check(asked: Asked, cause: causes.Cause, words: str) -> None:
    """The last line is this cause, with these words, a cure and a setting; its exit code is the command's."""
    assert asked.last["cause"] == cause.name, asked.last
    assert words in asked.last["value"]
    assert asked.last["cure"] == cause.cure and asked.last["setting"] == cause.setting
    assert asked.code == cause.exit_code
    assert all(line["mark"] == "ok" for line in asked.lines.values() if line is not asked.last)


def with_head(scenario: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    async def run() -> None:
        async with heads.head(*arguments, **options) as head:
            await asyncio.wait_for(scenario(head), 30.0)

    asyncio.run(run())


# -- below the bus -------------------------------------------------------------------------------------------------


def test_a_name_that_does_not_resolve(ask: Ask) -> None:
    check(ask("tcp://no.such.host.invalid:5555"), causes.UNRESOLVED, "no.such.host.invalid")


def test_a_resolver_that_says_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def say_nothing(*arguments: object) -> None:
        over.wait(30.0)
        raise OSError("too late")

    monkeypatch.setattr("cosmos_actor.cli.examination.reach.socket.getaddrinfo", say_nothing)
    check(ask("tcp://slow.example:5555"), causes.UNRESOLVED, "said nothing about slow.example for 1.5 s")
    over.set()


def test_a_port_at_which_nobody_listens(ask: Ask) -> None:
    check(ask("tcp://127.0.0.1:1"), causes.CLOSED, "127.0.0.1 refuses port 1")


def test_a_port_that_is_filtered(ask: Ask) -> None:
    with strangers.full_backlog() as address:
        check(ask(address), causes.FILTERED, "answered nothing for 2 s")


@pytest.mark.netns
@pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))
def test_no_route_and_a_head_of_another_host(keys: Path, record_property: Callable[[str, object], None]) -> None:
    command = [sys.executable, "-m", "cosmos_actor.cli", "doctor"]
    with two_hosts() as (left, right):
        asked = Asked(_answer(left.run([*command, "tcp://198.51.100.7:5555", "--json"], timeout=60, check=False)))
        check(asked, causes.NO_ROUTE, "to 198.51.100.7: Network is unreachable")
        record_property("seconds", asked.seconds)
        asked = Asked(_answer(left.run([*command, "--json"], timeout=60)))
        assert (asked.lines["default route"]["mark"], asked.lines["default route"]["setting"]) == ("warn", "bus.host")
        server = right.popen([sys.executable, "-c", HEAD, keys, f"tcp://{right.address}:0"], cwd=ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        address = server.stdout.readline().strip()
        asked = Asked(_answer(left.run([*command, address, "--key", keys / "rollout.key", "--json"], timeout=60)))
        server.communicate(timeout=20)
    assert asked.code == 0
    assert asked.lines["route"]["value"].endswith(f"reached from {left.address} over {left.interface}")
    assert asked.lines["host_id"]["value"].startswith("another host")


HEAD = """
import asyncio, sys
from pathlib import Path
from tests.bus import strangers
from tests.cli import heads

async def serve():
    async with heads.head(Path(sys.argv[1]), listen=sys.argv[2]) as head:
        print(head.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(serve())
"""


def _answer(done: subprocess.CompletedProcess[str]) -> Answer:
    assert "Traceback" not in done.stderr, done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)


# -- what listens there, and with which keys: the reason for each, and the time until it is named ---------------------


@pytest.mark.parametrize(("listening", "cause", "words"), [
    (lambda: strangers.listener(strangers.raw_bytes), causes.NOT_ZMTP, "HTTP, it begins with b'HTTP/1.1 400"),
    (lambda: strangers.listener(lambda connection, over: None), causes.NOT_ZMTP, "it"),
    (lambda: strangers.listener(strangers.silence), causes.SILENT, "0 of 64 bytes of a greeting"),
    (lambda: strangers.listener(strangers.one_byte_at_a_time), causes.SILENT, "of 64 bytes of a greeting"),
    (strangers.null_socket, causes.NO_CURVE, "it speaks ZMTP 3.1 with NULL"),
], ids=["raw bytes", "closes at once", "says nothing", "slow handshake", "NULL"])
def test_what_is_no_head(ask: Ask, keys: Path, listening: Callable[[], Any], cause: causes.Cause, words: str) -> None:
    with listening() as address:
        check(ask(address, "--key", keys / "rollout.key"), cause, words)


def test_a_stopped_process_is_silent(ask: Ask, keys: Path, popen: Callable[..., subprocess.Popen[str]]) -> None:
    process = popen([sys.executable, "-c", HEAD, str(keys), "tcp://127.0.0.1:0"], cwd=ROOT,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    process.send_signal(19)  # SIGSTOP
    stat = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the process stands still")
    check(ask(address, "--key", keys / "rollout.key"), causes.SILENT, "0 of 64 bytes")


def test_a_head_whose_loop_stands_still(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        asked: list[Asked] = []
        thread = threading.Thread(target=lambda: asked.append(ask(head.address, "--key", keys / "rollout.key")))
        thread.start()
        thread.join(20.0)  # this loop, which is the head's, does nothing meanwhile
        check(asked[0], causes.STUCK, "no registry at")

    with_head(scenario, keys)


def test_a_wrong_server_key(ask: Ask, keys: Path, tmp_path: Path) -> None:
    async def scenario(head: Any) -> None:
        others = heads.make_keys(tmp_path / "others", "run-2")
        asked = await heads.beside(ask, head.address, "--key", others / "rollout.key")
        check(asked, causes.SERVER_KEY, "wrong server key: the listener does not hold the key")
        assert "the key file is of run run-2" in asked.last["value"]

    with_head(scenario, keys)


def test_an_actor_that_is_not_the_head(ask: Ask, keys: Path) -> None:
    async def scenario(actor: Any) -> None:
        asked = await heads.beside(ask, actor.address, "--key", keys / "reward.key")
        check(asked, causes.OTHER_ROLE, "the listener has the key of policy, not of registry")

    with_head(scenario, keys, role="policy")


def test_a_key_that_is_not_on_the_list(ask: Ask, keys: Path, tmp_path: Path) -> None:
    async def scenario(head: Any) -> None:
        strangers = heads.make_keys(tmp_path / "others") / "rollout.key"
        key = heads.forge(strangers, peers=dict(KeyRing.load(keys / "rollout.key").peers))
        asked = await heads.beside(ask, head.address, "--key", key)
        check(asked, causes.NOT_LISTED, "the listener does not know our key")

    with_head(scenario, keys)


def test_a_key_of_another_role(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        asked = await heads.beside(ask, head.address, "--key", keys / "reward.key", "--role", "rollout")
        check(asked, causes.KEY_ROLE, "reward.key belongs to reward, not to rollout")
        forged = heads.forge(keys / "reward.key", role="rollout")
        asked = await heads.beside(ask, head.address, "--key", forged)
        check(asked, causes.KEY_ROLE, "the peer says rollout, its key belongs to reward")

    with_head(scenario, keys)


# -- what the head says ------------------------------------------------------------------------------------------------


def test_another_run(ask: Ask, keys: Path, here: Path) -> None:
    make_run(here / "run", metrics=[])

    async def scenario(head: Any) -> None:
        forged = heads.forge(keys / "rollout.key", run_id="run-7")
        asked = await heads.beside(ask, head.address, "--key", forged)
        check(asked, causes.OTHER_RUN, "other run: we are run-1, the peer is run-7")
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key", "--run", "run")
        check(asked, causes.OTHER_RUN, "rollout.key is of run run-1")
        assert f"{here / 'run'} is run sample" in asked.last["value"]

    with_head(scenario, keys)


def test_schema_skew_with_both_versions(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key")
        check(asked, causes.SCHEMAS, "schema generation_request: we have version 2, the peer version 1")

    version, fingerprint = known_of_an_actor()["generation_request"]
    with_head(scenario, keys, schemas={**known_of_an_actor(), "generation_request": (version + 1, fingerprint)})


def known_of_an_actor() -> dict[str, tuple[int, int]]:
    """What `doctor` loads is what an actor would say."""
    return dict(known_schemas())


def test_another_protocol(ask: Ask, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seal = envelope.seal_control

    def newer(kind: int, payload: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(envelope, "PROTOCOL", 2)
            return seal(kind, payload)

    monkeypatch.setattr("cosmos_actor.bus.dialler.seal_control", newer)

    async def scenario(head: Any) -> None:
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key")
        check(asked, causes.PROTOCOL, "we speak 1, the peer 2")

    with_head(scenario, keys)


def test_a_stale_incarnation(ask: Ask, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_actor.bus.new_incarnation", lambda: "5" * 32)

    async def scenario(head: Any) -> None:
        head.bus.forget("rollout-3", "5" * 32, "killed by SIGKILL")
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key", "--name", "rollout-3")
        check(asked, causes.STALE, "stale incarnation 55555555 of rollout-3: killed by SIGKILL")

    with_head(scenario, keys)


def test_a_name_in_use(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        from cosmos_actor.bus import Identity
        living = Identity(heads.RUN, "rollout", "rollout-3", "1")
        head.registry.announce(living, Announce("tcp://127.0.0.1:1", 1, "python", "host", True))
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key", "--name", "rollout-3")
        check(asked, causes.NAME, "the run has an actor named rollout-3 already")
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key", "--name", "rollout-4")
        assert asked.code == 0

    with_head(scenario, keys)


def test_an_unknown_refusal_is_the_heads_own_line(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        head.bus.admit_by(lambda theirs: "closed for lunch")
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key")
        check(asked, causes.REFUSED, "the head says: closed for lunch")

    with_head(scenario, keys)


def test_clocks_that_differ(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        asked = await heads.beside(ask, head.address, "--key", keys / "rollout.key")
        line = asked.lines["clock"]
        assert (line["mark"], line["cause"], asked.code) == ("warn", "clock skew", causes.SKEW.exit_code)
        assert "the head's is 1799." in line["value"] or "the head's is 1800." in line["value"]

    with_head(scenario, keys, clock=lambda: time.time() + 1800.0)


# -- when nothing is wrong ---------------------------------------------------------------------------------------------


def test_a_head_that_takes_us(cli: Cli, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        answer = await heads.beside(cli, "doctor", head.address, "--key", str(keys / "rollout.key"))
        assert answer.code == 0
        said = [line.split(": ")[0] for line in answer.out.splitlines()]
        assert said == [f"ok   {what}" for what in ("name", "route", "port", "greeting", "handshake", "clock",
                                                    "round trip", "host_id")]
        assert "equal: one host; lane and shared memory are in use" in answer.out
        assert not head.registry.membership().members

    with_head(scenario, keys)


def test_without_a_key_what_can_be_seen_is_seen(ask: Ask, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        asked = await heads.beside(ask, head.address)
        assert asked.code == 0 and asked.last["mark"] == "warn"
        assert asked.last["cure"] == "name one with --key, or the run directory with --run"
        assert asked.lines["greeting"]["value"] == "ZMTP 3.1, CURVE"

    with_head(scenario, keys)


def test_the_run_directory_knows_head_and_key(ask: Ask, here: Path) -> None:
    from cosmos_actor.actors.run_directory import RunDirectory
    with RunDirectory.create(here / "run", "digest", run_id=heads.RUN) as directory:
        heads.make_keys(directory.keys)

        async def scenario(head: Any) -> None:
            (directory.root / "status.json").write_text(json.dumps({"head": head.address, "members": []}))
            asked = await heads.beside(ask, "--run", "run")
            assert asked.code == 0 and "takes rollout" in asked.lines["handshake"]["value"]

        with_head(scenario, directory.keys)


def test_this_host(ask: Ask) -> None:
    asked = ask()
    assert list(asked.lines) == [
        "RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "/dev/shm", "memfd, /proc/PID/fd", "ptrace scope", "clock", "libzmq",
        "Python", "numpy", "uvloop", "memory", "cores", "default route"]
    assert asked.lines["memfd, /proc/PID/fd"]["value"] == "two processes open each other's memory"
    assert "with CURVE" in asked.lines["libzmq"]["value"]


def test_too_few_descriptors_are_bad_and_one_core_is_a_warning() -> None:
    code = ("import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
            "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
            "from cosmos_actor.cli import main; raise SystemExit(main(['doctor']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    line = done.stdout.splitlines()[0]
    assert line.startswith("bad  RLIMIT_NOFILE: 200, may be raised to 200 → ") and "bus.min_descriptors" in line
    assert "\nwarn cores: 1 of " in done.stdout


def fail(error: OSError) -> Callable[..., Any]:
    def call(*arguments: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(("what", "fault", "mark", "words"), [
    ("memfd, /proc/PID/fd", ("os.memfd_create", fail(PermissionError(1, "Operation not permitted"))), "bad",
     "memfd_create: Operation not permitted"),
    ("memfd, /proc/PID/fd", ("CHILD", "open('/proc/1/no')"), "warn", "a child can not open ours: FileNotFoundError"),
    ("memfd, /proc/PID/fd", ("CHILD", "print(99, flush=True); input()"), "warn", "we can not open a child's"),
    ("/dev/shm", ("shutil.disk_usage", fail(FileNotFoundError(2, "No such file or directory"))), "bad", "No such file"),
    ("/dev/shm", ("ENOUGH_SHM_BYTES", 2**60), "warn", "GiB free"),
    ("clock", ("_kernel_is_synchronised", lambda: None), "warn", "unknown whether it is synchronised"),
    ("clock", ("_kernel_is_synchronised", lambda: True), "ok", "synchronised; monotonic to"),
    ("libzmq", ("zmq.has", lambda feature: False), "bad", "without CURVE"),
    ("memory", ("_cgroup_number", lambda name: 2.0**20 * ("max" in name)), "warn", "of this control group"),
    ("cores", ("_cpu_quota", lambda: 0.5), "warn", "0.5 by the control group's quota"),
])
def test_what_is_not_well_with_this_host(
        ask: Ask, monkeypatch: pytest.MonkeyPatch, what: str, fault: tuple[str, Any], mark: str, words: str) -> None:
    monkeypatch.setattr(f"cosmos_actor.cli.examination.host.{fault[0]}", fault[1])
    line = ask().lines[what]
    assert line["mark"] == mark and words in line["value"]
    assert bool(line["cure"] and line["setting"]) == (mark != "ok")


def test_a_key_that_can_not_be_used_is_a_mistake(cli: Cli, keys: Path) -> None:
    async def scenario(head: Any) -> None:
        (keys / "rollout.key").chmod(0o644)
        answer = await heads.beside(cli, "doctor", head.address, "--key", str(keys / "rollout.key"))
        assert "has mode 0644: others can read it; chmod 600" in answer.error

    with_head(scenario, keys)


@pytest.mark.parametrize(("greeting", "value"), [
    (Greeting((3, 1), "PLAIN"), "no CURVE: it speaks ZMTP 3.1 with PLAIN"),
    (Greeting((2, 0), ""), "no CURVE: it speaks ZMTP 2.0 with no security at all"),
])
def test_other_mechanisms_and_older_versions_are_no_head(greeting: Greeting, value: str) -> None:
    assert judge_greeting(greeting) == causes.bad("greeting", causes.NO_CURVE, value.partition(": ")[2])


def test_the_exit_code_is_that_of_the_first_bad_line_else_of_the_first_warning_with_a_cause() -> None:
    fine, warning = causes.Observation("a", "ok", ""), causes.Observation("b", "warn", "", "cure", "setting")
    skew = causes.Observation("clock", "warn", "", "cure", "setting", causes.SKEW)
    unfit = causes.Observation("c", "bad", "", "cure", "setting")
    assert causes.exit_code([fine, warning]) == 0
    assert causes.exit_code([fine, warning, skew]) == causes.SKEW.exit_code
    assert causes.exit_code([skew, causes.bad("port", causes.CLOSED, "")]) == causes.CLOSED.exit_code
    assert causes.exit_code([skew, unfit]) == 1


def test_each_cause_has_its_own_name_exit_code_cure_and_setting() -> None:
    assert len({cause.exit_code for cause in causes.CAUSES}) == len(causes.CAUSES)
    assert len({cause.name for cause in causes.CAUSES}) == len(causes.CAUSES)
    assert all(cause.cure and cause.setting and cause.exit_code > 2 for cause in causes.CAUSES)
    assert {value for value in vars(causes).values() if isinstance(value, causes.Cause)} == set(causes.CAUSES)


def test_the_page_lists_every_cause() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in page.splitlines() if row.count("|") == 6}
    assert {cause.name: str(cause.exit_code) for cause in causes.CAUSES}.items() <= rows.items()
