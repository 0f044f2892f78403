"""`cosmos-actor sim describe`, `new`, `test`, `record` and `wheel`: for whoever brings a simulator."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from .mistakes import Mistake

EXAMPLE = "cosmos-actor sim test gymnasium:CartPole-v1"
RECORD_EXAMPLE = "cosmos-actor sim record my_simulator:push --out demonstrations --episodes 50 --only-success"
WHEEL_EXAMPLE = "cosmos-actor sim wheel --out dist"
HANG_S = 600.0
"""A check that takes longer hangs. The process ends with the stacks of its threads, after the name of that check."""
BADLY = 1
"""Exit code where a check has failed."""
STOPPED = 130
"""That of a command which Ctrl-C ends."""


def add_commands(parser: argparse.ArgumentParser) -> None:
    """The five, each with what it takes."""
    commands = parser.add_subparsers(dest="command", metavar="describe | new | test | record | wheel")
    commands.required = True
    one = commands.add_parser("describe", description="What an installation of a simulator can do.")
    one.add_argument("simulator", metavar="KIND:ID")
    one.add_argument("--json", action="store_true", help="for programs")
    two = commands.add_parser("new", description="Write a package for a simulator of one's own. It passes `sim test`.")
    two.add_argument("name", metavar="NAME", help="of the package, its module and its kind, such as my_simulator")
    two.add_argument("--dir", default=".", metavar="DIR", help="where its folder is made (default: here)")
    three = commands.add_parser("test", description="Whether a simulator keeps what is asked of one: a line a check. "
                                "Exit code 0 only if none fails.")
    three.add_argument("simulator", metavar="KIND:ID")
    three.add_argument("--envs", type=int, default=2, metavar="N", help="slots of a session (default 2)")
    three.add_argument("--steps", type=int, default=50, metavar="N", help="of an episode, at most (default 50)")
    three.add_argument("--json", action="store_true", help="for programs")
    _add_record(commands)
    five = commands.add_parser("wheel", description="Write what a simulator's environment needs of this package as one "
                               "small wheel, for a host to which it is easier to copy a file than to install from an "
                               "index. It has `attach` and `sim`, for CPython 3.8 or newer.",
                               epilog="Example: " + WHEEL_EXAMPLE)
    five.add_argument("--out", default=".", metavar="DIR", help="a folder to write it into (default: here)")


def _add_record(commands: Any) -> None:
    four = commands.add_parser("record", description="Let the simulator's scripted expert do its tasks, and write what "
                               "it saw and did as a dataset that lerobot reads.", epilog="Example: " + RECORD_EXAMPLE)
    four.add_argument("simulator", metavar="KIND:ID")
    four.add_argument("--out", required=True, metavar="DIR", help="a folder that does not exist")
    four.add_argument("--episodes", type=int, default=50, metavar="N", help="of each task (default 50)")
    four.add_argument("--task", action="append", default=[], metavar="NAME", help="can be given several times "
                      "(default: all)")
    four.add_argument("--noise", type=float, default=0.0, metavar="STD", help="added to what is done, not to what is "
                      "written down, in units of the action (default 0)")
    four.add_argument("--seed", type=int, default=0, metavar="N", help="other seeds, other episodes (default 0)")
    four.add_argument("--only-success", action="store_true", help="leave failures out")
    four.add_argument("--video", action="store_true", help="pictures as H.264, which is smaller and loses a little, "
                      "instead of PNG")
    four.add_argument("--workers", type=int, default=1, metavar="N", help="processes that record at once (default 1)")
    four.add_argument("--json", action="store_true", help="for programs")


def run_command(given: argparse.Namespace) -> int:
    """The exit code. Raises Mistake."""
    commands: Dict[str, Callable[[argparse.Namespace], int]] = {
        "describe": _describe, "new": _new, "test": _test, "record": _record, "wheel": _wheel}
    return commands[given.command](given)


def _describe(given: argparse.Namespace) -> int:
    from .telling import lines, plain

    simulator, description = loaded(given.simulator)
    if given.json:
        _print(json.dumps(plain(description, simulator.embodiment), indent=2))
    else:
        _print("\n".join(lines(description, simulator.embodiment)))
    return 0


def _new(given: argparse.Namespace) -> int:
    from .new import new

    made = new(given.name, Path(given.dir))
    _print("{} is written. Next:\n  cd {} && pip install -e .\n  cosmos-actor sim test {}:push\n"
           "README.md in it says how it attaches.".format(made, made, given.name))
    return 0


def _test(given: argparse.Namespace) -> int:
    from . import conformance

    for name in ("envs", "steps"):
        if getattr(given, name) < 1:
            raise Mistake("--{} {}: expected 1 or more".format(name, getattr(given, name)))
    simulator, description = loaded(given.simulator)
    begin, end = (_nothing, _nothing) if given.json else (_begin, _end)

    def begun(check: str) -> None:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        begin(check)

    try:
        verdicts = conformance.run(simulator, name=description.simulator, envs=given.envs, steps=given.steps,
                                   begin=begun, end=end)
    finally:
        faulthandler.cancel_dump_traceback_later()
    counted = {status: sum(verdict.status == status for verdict in verdicts)
               for status in (conformance.OK, conformance.FAILED, conformance.SKIPPED)}
    if given.json:
        _print(json.dumps({"simulator": description.simulator, "passed": not counted[conformance.FAILED],
                           "checks": [verdict._asdict() for verdict in verdicts]}, indent=2))
    else:
        _print("{}: {}".format(description.simulator, ", ".join("{} {}".format(n, s) for s, n in counted.items())))
        for trace in sorted({verdict.trace for verdict in verdicts if verdict.trace}):
            os.write(2, ("\n" + trace).encode(errors="backslashreplace"))
    return BADLY if counted[conformance.FAILED] else 0


def _record(given: argparse.Namespace) -> int:
    from .recording import RecordOptions, record

    if given.episodes < 1:
        raise Mistake("--episodes {}: expected 1 or more".format(given.episodes))
    if given.workers < 1:
        raise Mistake("--workers {}: expected 1 or more".format(given.workers))
    if not 0 <= given.noise < float("inf"):
        raise Mistake("--noise {}: expected 0 or more".format(given.noise))
    simulator, description = loaded(given.simulator)
    options = RecordOptions(Path(given.out), given.episodes, given.task, given.noise, given.seed, given.only_success,
                            given.video, given.workers, given.simulator)
    begun = time.perf_counter()
    try:
        done = record(simulator, description, options, _nothing if given.json else _print)
    except OSError as error:
        raise Mistake("--out {}: {}".format(given.out, error.strerror or error)) from error
    except KeyboardInterrupt:
        os.write(2, b"stopped: nothing is written\n")
        return STOPPED
    seconds = time.perf_counter() - begun
    if given.json:
        _print(json.dumps({"directory": given.out, "seconds": round(seconds, 3), **done._asdict()}))
    else:
        _print("{}: {:,} episodes, {:,} frames, {:.1f} MB, {:.0f} frames/s".format(
            given.out, done.written, done.frames, done.bytes / 1e6, done.frames / seconds))
    return 0


def _wheel(given: argparse.Namespace) -> int:
    from .wheel import write

    path, made = write(Path(given.out))
    _print("{}: {:.0f} kB, {} files. On the simulator's host, with it and the key copied there:\n"
           "  pip install ./{}\n"
           "  cosmos-actor attach KIND:ID --connect tcp://HOST:PORT --key simulator.key".format(
               path, len(made.content) / 1e3, made.files, made.name))
    return 0


def _nothing(told: Any) -> None:
    pass


def _begin(check: str) -> None:
    _print("{:<34} ".format(check), end="")


def _end(verdict: Any) -> None:
    _print("{:<8} {}".format(verdict.status, verdict.seen))


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def loaded(text: str) -> Tuple[Any, Any]:
    """(simulator, its description), as they are installed here; what that prints goes to stderr. Raises Mistake."""
    from .attach import UNATTENDED, described
    from .conformance.stdio import Stdio
    from .plugins import SimulatorName, load

    for variable, value in UNATTENDED.items():
        os.environ.setdefault(variable, value)
    name, stdio = SimulatorName.parse(text), Stdio()
    try:
        with stdio:
            simulator = load(name)
            return simulator, _described(described, simulator, str(name))
    finally:
        os.write(2, stdio.printed)


def _described(described: Callable[..., Any], simulator: Any, name: str) -> Any:
    try:
        return described(simulator, name, 1)
    except Mistake:
        raise
    except Exception as error:
        raise Mistake("{} can not describe itself: {}: {}".format(name, type(error).__name__, error)) from error
