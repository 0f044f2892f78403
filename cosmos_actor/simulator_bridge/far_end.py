"""What a launcher (ssh, srun, docker exec, ip netns exec) starts on a node. It hears by standard input what to run.

    up ── letter, one line ──> launcher ──> far_end <── here; then the input is held open: the lifeline
       <──── exit code ─────── launcher <── far_end ── starts ──> PYTHON -m cosmos_actor.cli attach …

Guarantees: what it runs gets the words, variables and input of the letter, whatever is in them. It ends, with all that
it has started, at most LEAVE_S after the end of the lifeline or a signal, also when it hangs or is stopped; and this
process ends with its exit code, 128 + N where a signal N killed it.

Why a letter: ssh joins its words and a shell on the node takes them apart again, srun and docker hand them on as they
are, so no quoting is right for all of them; most carry no environment; and a key has no place on a command line. So the
command line has nothing that a shell would change, and all else goes where every launcher hands on bytes.

Why a process: a launcher that is killed says nothing to what it has started elsewhere, but that its input is at its
end. A simulator that hangs with the interpreter locked, or is stopped, would not hear it, and nobody there would kill
it. Standard library only: it runs before anything of the simulator is known.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Sequence, Tuple

from cosmos_actor import death

from . import orphans
from .mistakes import Mistake
from .standard_input import read_line, read_part

LETTER_S = 20.0
"""It is on its way before the launcher starts; a launcher that does not carry it must not leave a process behind."""
LEAVE_S = 6.0
"""From SIGTERM to SIGKILL: a simulator that can has left by itself after 5 s."""
PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""What every shell leaves as it is."""


@dataclass
class Letter:
    """What to run: the words after the interpreter, variables beside those of the node, and its standard input."""

    words: List[str]
    env: Dict[str, str] = field(default_factory=dict)
    text: str = ""

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode("ascii") + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Letter:
        """Raises Mistake."""
        try:
            return cls(**json.loads(line.decode("ascii")))
        except (ValueError, TypeError):
            raise Mistake("what came on standard input is for another version of cosmos-actor, or not for it") from None


def command(through: Sequence[str], python: str) -> Tuple[str, ...]:
    """What starts a far end. Raises Mistake: a shell would make something else of the interpreter's name."""
    if PLAIN.fullmatch(python) is None:
        raise Mistake("{}: through a launcher an interpreter's path has letters, digits and @ % + = : , . / - _ only, "
                      "which no shell changes".format(python))
    return (*through, python, "-m", "cosmos_actor.simulator_bridge.far_end")


def main() -> int:
    try:
        letter = Letter.parse(read_line("what to run (docker exec and kubectl exec need -i)", LETTER_S))
    except Mistake as error:
        _say("error: {}".format(error))
        return 2
    return run(letter)


def run(letter: Letter) -> int:
    """See the module; its exit code."""
    orphans.adopt()
    child = _start(letter)

    def leave(*_: Any) -> None:
        threading.Thread(target=_end, args=(child,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    threading.Thread(target=_at_end_of_input, args=(leave,), daemon=True).start()
    code = child.wait()
    orphans.end()
    if code >= 0:
        return code
    _say("killed by signal {} ({})".format(-code, signal.strsignal(-code)))
    return 128 - code


def _start(letter: Letter) -> subprocess.Popen[bytes]:
    """The marks of a supervisor's children are of its host: elsewhere its process number is nobody's or another's."""
    marks = (death.SUPERVISOR, death.DEATH_FD)
    inherited = {name: value for name, value in os.environ.items() if name not in marks}
    child = subprocess.Popen([sys.executable, *letter.words], env={**inherited, **letter.env}, stdin=subprocess.PIPE,
                             preexec_fn=death.with_parent)
    assert child.stdin is not None
    try:
        child.stdin.write(letter.text.encode())
        child.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already, and says why by its exit code
    return child


def _at_end_of_input(leave: Any) -> None:
    while read_part(None):
        pass  # nothing more is said
    leave()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    time.sleep(LEAVE_S)
    child.kill()


def _say(line: str) -> None:
    try:
        os.write(2, (line + "\n").encode(errors="backslashreplace"))
    except OSError:
        pass  # the launcher is gone, and with it who would read


if __name__ == "__main__":
    sys.exit(main())
