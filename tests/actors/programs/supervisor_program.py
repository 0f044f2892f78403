"""A whole small job in processes of its own, to be killed: `supervisor_program.py FOLDER PYTHON38 KIND...`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cosmos_actor.actors.child_spec import ChildSpec
from tests.actors.supervised import MEMORY, SLEEPER, STUBBORN, Job, python

LEAVE = """
from cosmos_actor import death; death.install()
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 600 & exit"]).wait()
print("here", flush=True); time.sleep(600)
"""
STUCK_IN_C = "from cosmos_actor import death; death.install(); print('here', flush=True); import signal; signal.pause()"
DEEP = ("from cosmos_actor import death\nimport subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {SLEEPER!r}], close_fds=False)")
CODE = {
    "sleeper": SLEEPER,  # ordinary
    "stubborn": STUBBORN,  # ignores SIGTERM
    "leave": LEAVE,  # has children in other sessions, one of them an orphan
    "deep": DEEP,  # only its child knows of death, and has another parent than the supervisor
    "bare": "print('here', flush=True); import time; time.sleep(600)",  # has never heard of death
    "memory": MEMORY,  # has made shared memory as vLLM does while it starts
    "old": SLEEPER,  # on Python 3.8
}


def child(kind: str, python38: str) -> ChildSpec:
    return python(CODE[kind], f"{kind}-0", interpreter=python38 if kind == "old" else sys.executable)


async def main(folder: str, python38: str, *kinds: str) -> None:
    async with Job(Path(folder), *(child(kind, python38) for kind in kinds)) as job:
        for kind in kinds:
            await job.logged(f"{kind}-0", "here")
        print("keeper", job.supervisor._keeper.pid, flush=True)
        await job.supervisor.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
