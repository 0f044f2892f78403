"""The queues of vLLM in /dev/shm lose their names once everybody has them: then no kill can leave them behind.

Their memory goes with the last process that maps it. With their names they stay after a `kill -9` of all that could
take them away, hundreds of megabytes of address each, and of memory as much as was ever written. Until they lose them,
while vLLM starts, their names say whose they are, and whoever ends that life takes them away.
"""

from __future__ import annotations

import gc
import os
from multiprocessing import current_process, shared_memory

from cosmos_actor import death
from cosmos_actor.actors.keeper import memory_prefix

RANDOM_DIGITS = 16
"""Of a name, after the prefix; hexadecimal."""


def mark_names() -> None:
    """From now on names of shared memory and of locks that this process makes begin with `memory_prefix` of its life.

    Without a supervisor nothing is changed: nobody would look for them. The variables are private to multiprocessing,
    and the same from Python 3.8 to 3.13; where they are not, a name stays what it was.
    """
    supervisor, incarnation = os.environ.get(death.SUPERVISOR), os.environ.get(death.INCARNATION)
    if not supervisor or not incarnation:
        return
    prefix = "/" + memory_prefix(supervisor, incarnation)
    if hasattr(shared_memory, "_SHM_NAME_PREFIX") and hasattr(shared_memory, "_SHM_SAFE_NAME_LENGTH"):
        vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + RANDOM_DIGITS)
    configuration = getattr(current_process(), "_config", {})
    if "semprefix" in configuration:
        configuration["semprefix"] = prefix.rstrip("-")  # to which it adds a dash


def forget_names() -> None:
    """Of the queues that this process made. To be called when all processes of the engine are ready, and have opened
    them."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()  # what vLLM has frozen is not listed
    for found in gc.get_objects():
        if type(found) is ShmRingBuffer and found.is_creator:
            found.shared_memory.unlink()
            found.is_creator = False  # it would unlink it again at its end
    if frozen:
        gc.freeze()
