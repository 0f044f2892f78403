"""Simulators that are started through a launcher: what can be known to be wrong is asked on each node, through it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cosmos_actor.actors.child import OpenInput
from cosmos_actor.actors.errors import NotFound, UserError
from cosmos_actor.bus.errors import BusError
from cosmos_actor.bus.socket import reserve
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.simulator_bridge import far_end
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.plugins import SimulatorName

NODE_DEADLINE_S = 60.0
"""A simulator that takes longer to describe itself hangs, or the launcher asks somebody for a password."""
MOST_AT_ONCE = 8
"""Nodes asked side by side; an sshd in front of all drops some where more than ten connections begin at once."""
NO_WAY, NO_SIMULATOR, NO_PROGRAM = 3, 2, 127
"""Exit codes: no connection to this host; a mistake in the simulator's name or package; a shell without a Python."""
SAID = 80
"""Characters of an answer that is none."""
MARK = "cosmos-actor: Python "
"""What comes before it is the node's shell's."""
ASK = f"""
import platform, socket, sys
import cosmos_actor.bus
from cosmos_actor.simulator_bridge.cli import main
host, port, name = sys.argv[1:]
try:
    socket.create_connection((host, int(port)), 10.0).close()
except OSError as error:
    sys.stderr.write("{{}}\\n".format(error.strerror or error))
    sys.exit({NO_WAY})
sys.stdout.write("{MARK}{{}}\\n".format(platform.python_version()))
sys.stdout.flush()
sys.exit(main(["sim", "describe", name, "--json"]))
"""


def simulators_on_nodes(settings: RunSettings, shown: int) -> str:
    """That the simulator can be loaded on each node that gets one, and that the node reaches the door on this host."""
    sim = settings.sim
    launchers = list(dict.fromkeys(sim.launcher(index) for index in range(sim.count)))
    try:
        listener, door = reserve(f"tcp://{settings.bus.host}:{sim.port}")
    except BusError as error:
        raise UserError(error.text, setting="sim.port" if sim.port else "bus.host") from error
    with listener, ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        answers = list(pool.map(lambda through: _ask(settings, through, door), launchers))
    pythons = ", ".join(sorted({python for python, _ in answers}))
    tasks = answers[0][1]
    return (f"{sim.kind}: {len(tasks)} task{'s' * (len(tasks) > 1)}, {', '.join(tasks[:shown])}; Python {pythons} "
            f"through {', '.join(map(shlex.join, launchers))}")


def _ask(settings: RunSettings, through: Sequence[str], door: str) -> tuple[str, list[str]]:
    """The node's version of Python and its tasks. Raises NotFound, which says through what, or UserError."""
    sim, python = settings.sim, settings.sim.python or sys.executable
    where = f"{python} through `{shlex.join(through)}`"
    if shutil.which(through[0]) is None:
        raise NotFound(f"there is no program {through[0]}", setting="sim.through")
    done = _answer(settings, through, python, door, where)
    last = (done.stderr.strip().splitlines() or ["no output"])[-1].removeprefix("error: ")
    if done.returncode == NO_WAY:
        raise UserError(f"{where} can not reach {door} on this host: {last}; name an address that it can reach",
                        setting="bus.host")
    if done.returncode:
        setting = {NO_SIMULATOR: "sim.kind", 1: "sim.python", NO_PROGRAM: "sim.python"}.get(
            done.returncode, "sim.through")
        raise NotFound(f"{sim.kind} can not be loaded by {where}: {last}", setting=setting)
    try:
        version, _, described = done.stdout.rpartition(MARK)[2].partition("\n")
        return version, [str(task["name"]) for task in json.loads(described)["tasks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise NotFound(f"{sim.kind} is not described by {where}, only said: {done.stdout.strip()[-SAID:] or 'nothing'}",
                       setting="sim.through") from error


def _answer(settings: RunSettings, through: Sequence[str], python: str, door: str,
            where: str) -> subprocess.CompletedProcess[str]:
    sim = settings.sim
    host, _, port = door.removeprefix("tcp://").rpartition(":")
    try:
        name = str(SimulatorName.parse(sim.kind, sim.options))
    except Mistake as error:
        raise NotFound(str(error), setting="sim.kind") from error
    try:
        command = far_end.command(through, python)
        given = OpenInput(far_end.Letter(["-c", ASK, host.strip("[]"), port, name], dict(sim.env)).line())
    except Mistake as error:
        raise NotFound(str(error), setting="sim.python") from error
    try:
        return subprocess.run(command, stdin=given.read_fd, capture_output=True, text=True, errors="replace",
                              timeout=NODE_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise NotFound(f"{where} did not answer within {NODE_DEADLINE_S:g} s", setting="sim.through") from error
    except OSError as error:
        raise NotFound(f"{through[0]} does not run: {error}", setting="sim.through") from error
    finally:
        given.close()
