"""`cosmos-actor attach` as a process: what it says, what it survives, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor import death
from cosmos_actor.bus import Limits
from cosmos_actor.simulator_bridge.attach import FORCE_S, valid_address
from cosmos_actor.simulator_bridge.mistakes import Mistake
from tests.simulator_bridge.driver import Driver, make_keys, scenario
from tests.simulator_bridge.worlds import SLOW_S, unit

ROOT = Path(__file__).parents[2]
WORLDS = "python:tests.simulator_bridge.worlds:make:counters"
TOLD_WITHIN_S = 5.0
Popen = Any
Keys = "dict[str, Path]"


def attach(popen: Popen, *words: str, **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return popen([sys.executable, "-m", "cosmos_actor.cli", "attach", *words], cwd=str(ROOT), env=environment,
                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], within_s: float = TOLD_WITHIN_S + 2.0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out, err


async def until_ended(process: subprocess.Popen[str], within_s: float = 20.0) -> tuple[int, str, str]:
    return await asyncio.get_running_loop().run_in_executor(None, ended, process, within_s)


def to(address: str, key: Path, *more: str) -> list[str]:
    return [WORLDS, "--connect", address, "--key", str(key), *more]


def test_it_serves_until_the_run_is_over(keys: Keys, popen: Popen, tmp_path: Path) -> None:
    async def play(driver: Driver, address: str) -> None:
        closed = tmp_path / "closed"
        process = attach(popen, *to(address, keys["simulator"], "--envs", "2", "--name", "counters-0",
                                    "--option", f"close_file={closed}"))
        offer = await driver.attached()
        assert (offer.envs, offer.pid) == (2, process.pid)
        assert offer.description.simulator == f"{WORLDS}?close_file={closed}"
        await driver.reset({1: unit(seed=4)})
        assert (await driver.step([1], [[3, 3]])).observations["count"].tolist() == [[4, 6]]
        await driver.bus.close()
        code, out, err = await until_ended(process)
        assert (code, out) == (0, "")
        assert "counters-0: attached to rollout-0" in err
        assert err.endswith("counters-0: the run is over: it said goodbye: closed\n")
        assert closed.read_text() == "closed"

    scenario(keys, play)


@pytest.mark.parametrize("name", ["../../x", "a b", "-x", "x" * 65])
def test_a_name_that_can_not_be_a_file_is_refused(name: str, keys: Keys, popen: Popen) -> None:
    process = attach(popen, *to("tcp://127.0.0.1:9", keys["simulator"]), "--name={}".format(name))
    code, out, err = ended(process)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith("error: --name {}: expected letters".format(name[:64]))


def test_what_it_prints_and_asks_breaks_nothing(keys: Keys, popen: Popen) -> None:
    async def play(driver: Driver, address: str) -> None:
        process = attach(popen, *to(address, keys["simulator"], "--envs", "3"))
        await driver.attached()
        await driver.reset({0: unit("ask"), 1: unit("print"), 2: unit(seed=1)})
        stepped = await driver.step([0, 1, 2], [[1, 1], [1, 1], [1, 1]])
        (failure,) = stepped.failures
        assert (failure.slot, failure.kind) == (0, "step")
        assert "EOFError" in failure.text and "it asked a question" in failure.text
        assert stepped.observations["count"].tolist() == [[0, 2], [1, 2]]
        await driver.bus.close()
        code, out, err = await until_ended(process)
        assert (code, out) == (0, "")
        assert "Accept the licence?" in err and "hello, I am a simulator" in err

    scenario(keys, play)


def test_a_slow_reset_is_not_taken_for_a_lost_simulator(keys: Keys, popen: Popen) -> None:
    async def play(driver: Driver, address: str) -> None:
        attach(popen, *to(address, keys["simulator"]))
        await driver.attached()
        stepped = await driver.reset({0: unit("slow reset", seed=8)})
        assert stepped.seconds >= SLOW_S
        assert stepped.observations["count"].tolist() == [[8, 0]]
        assert len(driver.offers) == 1

    scenario(keys, play, limits=Limits(heartbeat_interval_s=0.2, lost_after_s=SLOW_S / 2))


def test_what_goes_wrong_when_its_worlds_are_closed_is_told_and_no_more(keys: Keys, popen: Popen) -> None:
    async def play(driver: Driver, address: str) -> None:
        process = attach(popen, *to(address, keys["simulator"], "--option", "close_file=/nowhere/at/all"))
        await driver.attached()
        await driver.bus.close()
        code, _, err = await until_ended(process)
        assert code == 0
        assert "closing it raised FileNotFoundError" in err

    scenario(keys, play)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_it_leave(number: signal.Signals, keys: Keys, popen: Popen, tmp_path: Path) -> None:
    async def play(driver: Driver, address: str) -> None:
        closed = tmp_path / "closed"
        process = attach(popen, *to(address, keys["simulator"], "--option", f"close_file={closed}"))
        await driver.attached()
        await driver.reset({0: unit()})
        process.send_signal(number)
        code, _, err = await until_ended(process)
        assert code == 0
        assert driver.left == [f"asked by {number.name}"]
        assert closed.exists()

    scenario(keys, play)


def test_a_signal_ends_it_also_when_the_simulator_hangs(keys: Keys, popen: Popen) -> None:
    async def play(driver: Driver, address: str) -> None:
        process = attach(popen, *to(address, keys["simulator"]))
        await driver.attached()
        await driver.reset({0: unit("hang")})
        asking = asyncio.ensure_future(driver.step([0], [[1, 1]]))
        assert process.stderr is not None
        while await asyncio.get_running_loop().run_in_executor(None, process.stderr.readline) != "hanging\n":
            pass
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        code, _, _ = await until_ended(process)
        assert code == 1
        assert time.monotonic() - begun < FORCE_S + 2.0
        asking.cancel()

    scenario(keys, play)


def test_a_wrong_key_is_told_within_5_s(keys: Keys, popen: Popen, tmp_path: Path) -> None:
    async def play(driver: Driver, address: str) -> None:
        other = make_keys(tmp_path / "other")["simulator"]
        begun = time.monotonic()
        code, out, err = await until_ended(attach(popen, *to(address, other)))
        assert time.monotonic() - begun < TOLD_WITHIN_S
        assert (code, out) == (2, "")
        assert f"--key is not of the run behind {address}" in only_error(err)

    scenario(keys, play)


def only_error(text: str) -> str:
    (line,) = text.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(("words", "said"), [
    (["python:tests.simulator_bridge.nowhere:make"], "there is no module tests.simulator_bridge.nowhere in "),
    (["python:tests.simulator_bridge.worlds:make", "--option", "speed=2"], "a counter has no options, got ['speed']"),
    (["python:tests.simulator_bridge.worlds:make:absent", "--envs", "2"],
     "make:absent can not open 2 environments: RuntimeError: no display here"),
    (["python:tests.simulator_bridge.worlds:make:speechless"],
     "make:speechless can not describe itself: RuntimeError: no device to ask"),
    (["python:tests.simulator_bridge.worlds:make:wordless"], "describes itself by NoneType and no Description"),
    (["gymnasum:CartPole-v1"], "did you mean `gymnasium`?"),
    (["gymnasium"], "expected KIND:ID, such as gymnasium:CartPole-v1"),
    ([WORLDS, "--envs", "9"], "--envs 9: " + WORLDS + " has 1 to 8 in one process"),
    ([WORLDS, "--envs", "0"], "--envs 0: "),
    ([WORLDS, "--envs", "many"], "argument --envs: invalid int value: 'many' (see cosmos-actor attach --help)"),
    ([WORLDS, "--option", "speed"], "option speed: expected NAME=VALUE"),
    ([WORLDS, "--frobnicate"], "unrecognized arguments: --frobnicate (see cosmos-actor attach --help)"),
    ([WORLDS, "--connect", "localhost:5"], "--connect localhost:5: expected tcp://HOST:PORT"),
    ([WORLDS, "--key", "no.key"], "there is no key file no.key; the job writes it into its run directory"),
    ([WORLDS, "--key", "README.md"], "README.md"),
])
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], said: str, keys: Keys, popen: Popen) -> None:
    usual = ["--connect", "tcp://127.0.0.1:1", "--key", str(keys["simulator"])]
    code, out, err = ended(attach(popen, *usual, *words), within_s=30.0)
    assert (code, out) == (2, "")
    assert said in only_error(err)


def test_an_import_that_fails_is_told_within_5_s(keys: Keys, popen: Popen, tmp_path: Path) -> None:
    (tmp_path / "broken_world.py").write_text("import libGL_of_tomorrow\n")
    begun = time.monotonic()
    process = attach(popen, "python:broken_world:make", "--connect", "tcp://127.0.0.1:1", "--key",
                     str(keys["simulator"]), PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    code, _, err = ended(process)
    assert time.monotonic() - begun < TOLD_WITHIN_S
    assert code == 2
    assert "there is no module libGL_of_tomorrow in " in only_error(err)


def test_the_key_of_another_role_is_named(keys: Keys, popen: Popen) -> None:
    code, _, err = ended(attach(popen, *to("tcp://127.0.0.1:1", keys["rollout"])))
    assert code == 2
    assert "is the key of role rollout, not of simulator (--key)" in only_error(err)


def test_a_key_can_come_on_standard_input(keys: Keys, popen: Popen) -> None:
    async def play(driver: Driver, address: str) -> None:
        process = attach(popen, *to(address, Path("-")))
        assert process.stdin is not None
        process.stdin.write(keys["simulator"].read_text())
        process.stdin.close()
        await driver.attached()
        await driver.reset({0: unit("ask")})
        (failure,) = (await driver.step([0], [[1, 1]])).failures
        assert "EOFError" in failure.text
        process.send_signal(signal.SIGTERM)
        await asyncio.get_running_loop().run_in_executor(None, process.wait, 20)

    scenario(keys, play)


@pytest.mark.parametrize(("role", "said"), [
    ("", "standard input is not a key file (--key)"),
    ("rollout", "standard input is the key of role rollout, not of simulator (--key)")])
def test_what_is_no_key_on_standard_input_is_told(role: str, said: str, keys: Keys, popen: Popen) -> None:
    process = attach(popen, *to("tcp://127.0.0.1:1", Path("-")))
    out, err = process.communicate(keys[role].read_text() if role else "", timeout=20.0)
    assert (process.returncode, out) == (2, "")
    assert said in only_error(err)


IMPATIENT = """
import sys
from cosmos_actor.cli import main
from cosmos_actor.simulator_bridge import attach
attach.KEY_S = 0.2
sys.exit(main(sys.argv[1:]))
"""


def test_a_key_on_standard_input_is_not_waited_for_for_ever(popen: Popen) -> None:
    process = popen([sys.executable, "-c", IMPATIENT, "attach", *to("tcp://127.0.0.1:1", Path("-"))], cwd=str(ROOT),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.wait(20) == 2
    assert "the key did not come to its end on standard input within 0.2 s" in only_error(process.stderr.read())


def test_it_dies_with_a_supervisor_that_started_it(keys: Keys, popen: Popen) -> None:
    process = attach(popen, *to("tcp://127.0.0.1:1", keys["simulator"]), **{death.SUPERVISOR: "1:999999999999:gone"})
    assert ended(process)[0] == -signal.SIGKILL


HELP = """
import sys
from cosmos_actor.cli import main
code = main(["attach", "--help"])
print(sorted({name.partition(".")[0] for name in sys.modules} & {"typer", "rich", "pydantic", "click", "torch"}))
sys.exit(code)
"""


def test_its_help_has_an_example_and_needs_no_library_of_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=str(ROOT), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "Example: cosmos-actor attach gymnasium:CartPole-v1" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("text", ["", "h:5", "tcp://h", "tcp://h:0", "tcp://h:70000", "tcp://a b:5", "ipc:///x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(Mistake, match="expected tcp://HOST:PORT"):
        valid_address(text)


def test_addresses() -> None:
    for address in ("tcp://10.0.0.7:5555", "tcp://gpu-7.example:1", "tcp://[fe80::1%eth0]:5555"):
        assert valid_address(address) == address


def test_the_typer_command_says_the_same_and_hands_on(keys: Keys, capfd: Any) -> None:
    pytest.importorskip("typer")
    from cosmos_actor.cli.app import run

    assert run(["attach", WORLDS, "--connect", "tcp://h", "--key", str(keys["simulator"])]) == 2
    assert "error: --connect tcp://h: expected tcp://HOST:PORT" in capfd.readouterr().err
