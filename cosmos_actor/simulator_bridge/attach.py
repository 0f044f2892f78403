"""The process of a simulator: what it may print, read and hold, how it learns that it is to end, and its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import signal
import socket
import sys
import threading
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict

from cosmos_actor import death
from cosmos_actor.bus.errors import KeyFileError
from cosmos_actor.bus.keys import KeyRing

from . import orphans
from .checked import CheckedSession
from .contract import Description, SimSession, Simulator
from .messages import SIMULATOR, Attach
from .mistakes import Mistake
from .pace import Pace
from .plugins import SimulatorName, load
from .standard_input import read_whole

FORCE_S = 5.0
"""After a signal, or after the end: whatever hangs in the simulator's own code or threads is left behind by then."""
KEY_S = 10.0
"""For a key on standard input. At a terminal, or where nobody closes it, its end would be waited for for ever."""
STDIN = "-"
ADDRESS = re.compile(r"tcp://([^\s:/\[\]]+|\[[0-9A-Fa-f:.%\w]+\]):(\d{1,5})")
LONGEST_NAME = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,%d}" % (LONGEST_NAME - 1))
UNATTENDED = {
    "HF_HUB_OFFLINE": "1",
    "PIP_NO_INPUT": "1",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Nobody is there to answer, and no download is to begin in the middle of an episode. What is set already stays."""


@dataclass(frozen=True)
class AttachOptions:
    """What `cosmos-actor attach` was told."""

    simulator: str
    """KIND:ID."""
    connect: str
    key: str
    envs: int = 1
    name: str = ""
    rejoin_s: float = 300.0
    options: Dict[str, Any] = field(default_factory=dict)
    max_memory_mb: int = 0


def attach(options: AttachOptions) -> int:
    """Serve one simulator until its run is over; the exit code. Raises Mistake before anything was attached."""
    death.install()
    name = SimulatorName.parse(options.simulator, options.options)
    address, keys = valid_address(options.connect), simulators_key(options.key)
    _check_name(options.name)
    own_stdio()
    orphans.adopt()
    try:
        return _attach(options, name, address, keys)
    finally:
        orphans.end()


def _attach(options: AttachOptions, name: SimulatorName, address: str, keys: KeyRing) -> int:
    simulator = load(name)
    description = described(simulator, str(name), options.envs)
    session = opened(simulator, str(name), options.envs)
    code = 1
    try:
        code = asyncio.run(_serve(options, session, description, simulator, address, keys))
    finally:
        _end_anyway(code)
        _close(session)
    return code


async def _serve(options: AttachOptions, session: SimSession, description: Description, simulator: Simulator,
                 address: str, keys: KeyRing) -> int:
    from .server import Ending, Place

    place = Place(address, options.name or "{}-{}-{}".format(SIMULATOR, socket.gethostname(), os.getpid()), keys,
                  options.rejoin_s, options.max_memory_mb << 20)
    server = make_server(simulator, description, session, options.envs, place)
    loop = asyncio.get_running_loop()

    def asked(number: int, frame: Any) -> None:
        """Also in the middle of a call of the simulator, if that lets Python run."""
        _end_anyway(1)
        loop.call_soon_threadsafe(server.leave, Ending(0, "asked by {}".format(signal.Signals(number).name)))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    ending = await server.run()
    say("{}{}: {}".format("error: " if ending.code else "", place.name, ending.line))
    return ending.code


def _close(session: SimSession) -> None:
    """What goes wrong now is told, and changes nothing of how it ended."""
    try:
        session.close()
    except Exception as error:
        say("closing it raised {}: {}".format(type(error).__name__, error))


def make_server(simulator: Simulator, description: Description, session: SimSession, envs: int, place: Any,
                **more: Any) -> Any:
    """A SimulatorServer that offers this process's simulator at `place`; `more` goes to it."""
    from .server import SimulatorServer

    pace = Pace()
    embodiment = simulator.embodiment
    offer = Attach(uuid.uuid4().hex, envs, description, None if embodiment is None else embodiment.plain(),
                   socket.gethostname(), os.getpid(), platform.python_version(),
                   os.environ.get(death.INCARNATION, ""))
    return SimulatorServer(CheckedSession(session, description, envs, pace=pace), offer, place, pace, say=say, **more)


def described(simulator: Simulator, name: str, envs: int) -> Description:
    """What it says of itself, under the name by which it was asked for. Raises Mistake."""
    try:
        description = simulator.describe()
    except (Exception, SystemExit) as error:
        raise Mistake("{} can not describe itself: {}: {}".format(name, type(error).__name__, error)) from error
    if not isinstance(description, Description):
        raise Mistake("{} describes itself by {} and no Description".format(name, type(description).__name__))
    if not 1 <= envs <= description.max_envs:
        raise Mistake("--envs {}: {} has 1 to {} in one process".format(envs, name, description.max_envs))
    embodiment = simulator.embodiment
    return replace(description, simulator=name, embodiment="" if embodiment is None else embodiment.digest)


def opened(simulator: Simulator, name: str, envs: int) -> SimSession:
    """Raises Mistake: no display, no licence, no memory for so many."""
    try:
        return simulator.open(envs)
    except (Exception, SystemExit) as error:
        raise Mistake("{} can not open {} environments: {}: {}".format(
            name, envs, type(error).__name__, error)) from error


def valid_address(text: str) -> str:
    match = ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match.group(2)) <= 65535:
        raise Mistake("--connect {}: expected tcp://HOST:PORT, such as tcp://10.0.0.7:5555".format(text))
    return text


def _check_name(name: str) -> None:
    """Raises Mistake. It becomes a name in files and lines of the run."""
    if name and NAME.fullmatch(name) is None:
        raise Mistake("--name {}: expected letters, digits, dots, dashes and underscores, at most {}".format(
            name[:LONGEST_NAME], LONGEST_NAME))


def simulators_key(named: str) -> KeyRing:
    """The key that a simulator comes in with: of a file, or standard input's for `-`. Raises Mistake."""
    where = "standard input" if named == STDIN else named
    try:
        keys = KeyRing.parse(read_whole("the key", KEY_S), where) if named == STDIN else _of_file(Path(named))
    except KeyFileError as error:
        raise Mistake("{} (--key)".format(error.text)) from error
    if keys.role != SIMULATOR:
        raise Mistake("{} is the key of role {}, not of {} (--key)".format(where, keys.role, SIMULATOR))
    return keys


def _of_file(path: Path) -> KeyRing:
    if not path.is_file():
        raise Mistake("there is no key file {}; the job writes it into its run directory, keys/{}.key (--key)".format(
            path, SIMULATOR))
    return KeyRing.load(path)


def own_stdio() -> None:
    """From now on a question finds no answer (EOFError), and what is printed goes to stderr, whoever prints it."""
    sys.stdout.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    for variable, value in UNATTENDED.items():
        os.environ.setdefault(variable, value)
    logging.basicConfig(format="%(message)s")


def say(line: str) -> None:
    """To whoever started it."""
    try:
        os.write(2, (" ".join(line.split()) + "\n").encode(errors="backslashreplace"))
    except OSError:
        pass  # a full disk, or a terminal that is gone, is no reason to stop


def _end_anyway(code: int) -> None:
    """A thread of the simulator, or a call that never returns, does not hold the process."""
    timer = threading.Timer(FORCE_S, _exit, (code,))
    timer.daemon = True
    timer.start()


def _exit(code: int) -> None:
    orphans.end()
    os._exit(code)
