"""The commands that run in a simulator's own environment: standard library only, since nothing else may be there."""

from __future__ import annotations

import argparse
import os
from typing import Callable, Dict, List, NoReturn, Sequence

from . import sim_commands
from .mistakes import Mistake

EXAMPLE = ("cosmos-actor attach gymnasium:CartPole-v1 --connect tcp://10.0.0.7:5555 --key run/keys/simulator.key "
           "--envs 16")


class _Parser(argparse.ArgumentParser):
    """Its errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise Mistake("{} (see cosmos-actor {} --help)".format(message, self.prog.partition(" ")[2]))


def main(arguments: Sequence[str]) -> int:
    """Run `arguments`, a command and its words; the exit code. A mistake of the caller is one line on stderr and 2."""
    command, words = arguments[0], list(arguments[1:])
    try:
        return COMMANDS[command](words) if command in COMMANDS else _unknown(command)
    except Mistake as error:
        line = "error: {}\n".format(error)
    os.write(2, line.encode(errors="backslashreplace"))
    return 2


def _unknown(command: str) -> NoReturn:
    raise Mistake("no command `{}` runs here; there are {}".format(command, ", ".join(COMMANDS)))


def attach_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cosmos-actor attach", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Attach a simulator to a running job, from the simulator's own environment. It dials out through "
        "one port.\nCtrl-C lets it leave; the job begins what it was doing elsewhere.",
        epilog="KIND is gymnasium, an installed plugin, or python:MODULE:CALLABLE.\n\nExample: " + EXAMPLE)
    parser.add_argument("simulator", metavar="KIND:ID", help="what to attach, such as gymnasium:CartPole-v1; options "
                        "can follow as ?NAME=VALUE&...")
    parser.add_argument("--connect", required=True, metavar="tcp://HOST:PORT", help="the actor that drives simulators")
    parser.add_argument("--key", required=True, metavar="FILE", help="the key file of the role simulator; - reads "
                        "it from standard input")
    parser.add_argument("--envs", type=int, default=1, metavar="N", help="environments in this process (default 1)")
    parser.add_argument("--name", default="", help="its name in the run (default simulator-HOST-PID)")
    parser.add_argument("--rejoin", type=float, default=300.0, metavar="SECONDS", help="how long to look for a driver "
                        "that can not be reached (default 300; 0: end then)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the "
                        "simulator; can be given several times")
    parser.add_argument("--max-memory-mb", type=int, default=0, metavar="MB", help="leave with exit code 3 when the "
                        "process holds more (default 0: never)")
    return parser


def _attach(words: List[str]) -> int:
    from .attach import AttachOptions, attach
    from .plugins import parse_options

    try:
        given = attach_parser().parse_args(words)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    return attach(AttachOptions(given.simulator, given.connect, given.key, given.envs, given.name, given.rejoin,
                                parse_options(given.option), given.max_memory_mb))


def sim_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cosmos-actor sim", formatter_class=argparse.RawDescriptionHelpFormatter,
                     description="For whoever brings a simulator: what it can do, a package for a new one, whether it "
                     "keeps\nwhat is asked of one, what its expert does as a dataset, and a small wheel for its host."
                     "\nRuns in the simulator's own environment.",
                     epilog="Example: " + sim_commands.EXAMPLE)
    sim_commands.add_commands(parser)
    return parser


def _sim(words: List[str]) -> int:
    try:
        given = sim_parser().parse_args(words)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    return sim_commands.run_command(given)


COMMANDS: Dict[str, Callable[[List[str]], int]] = {"attach": _attach, "sim": _sim}
"""Command -> what runs its words."""
