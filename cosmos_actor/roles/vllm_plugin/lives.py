"""A rollout and the workers of its vLLM live and die together, with or without a supervisor above them.

    rollout dies   each worker's own thread sees it, at once, and kills the worker, whatever else that waits for
    a worker dies  the rollout's thread sees it, says so and ends the rollout: a model without one of its parts computes
                   nothing, and vLLM would wait for the lost one's answer

Under a supervisor there is more: workers are in the rollout's process group, which is killed when the rollout ends.
The kernel's own signal (PR_SET_PDEATHSIG) is not used: it comes when the *thread* ends that started a worker.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

LOST_A_WORKER = 71
"""Exit code of a rollout (EX_OSERR); its log says which worker, and how that ended."""


def die_with_parent() -> None:
    """From now on this process, which multiprocessing started, is killed when the one that started it ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_after, args=(parent.sentinel,), name="with-parent", daemon=True).start()


def _die_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_workers() -> None:
    """From now on this process ends when one of its present children does, unless it is ending itself."""
    workers = multiprocessing.active_children()
    ending = threading.Event()
    atexit.register(ending.set)  # runs before vLLM's own, which was there first and ends the workers
    threading.Thread(target=_end_after, args=(workers, ending), name="with-workers", daemon=True).start()


def _end_after(workers: list[multiprocessing.process.BaseProcess], ending: threading.Event) -> None:
    by_sentinel = {worker.sentinel: worker for worker in workers}
    [first, *_] = wait(list(by_sentinel))
    if ending.is_set():
        return
    lost = by_sentinel[first]  # type: ignore[index]
    for worker in workers:
        worker.kill()  # else what they say of the loss would come after the line that names it
    for worker in workers:
        worker.join(1.0)
    print(f"{lost.name} (pid {lost.pid}) of vLLM ended with exit code {lost.exitcode}; this process ends with it",
          file=sys.stderr, flush=True)
    os._exit(LOST_A_WORKER)
