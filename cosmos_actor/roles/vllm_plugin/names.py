"""What vLLM has in /dev/shm loses its names once everybody has it open: then no kill can leave it behind.

    queues         of the driver and its workers (shm_broadcast)
    communicators  of workers that share a model on processors with AVX-512 (csrc/cpu/shm.cpp); others use Gloo

Their memory goes with the last process that maps it. With their names they stay after a `kill -9` of all that could
take them away, hundreds of megabytes of address each, and of memory as much as was ever written. Until they lose them,
while vLLM starts, their names say whose they are, and whoever ends that life takes them away.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from multiprocessing import current_process, shared_memory

from cosmos_actor import death
from cosmos_actor.actors.keeper import SHARED_MEMORY, memory_prefix

RANDOM_DIGITS = 16
"""Of a name, after the prefix; hexadecimal."""
COMMUNICATOR = "-cpushm_"
"""In the names that vLLM gives to the memory of its communicators, after what says of which engine."""


def mark_names() -> None:
    """From now on names of shared memory and of locks that this process makes begin with `memory_prefix` of its life.

    Without a supervisor nothing is changed: nobody would look for them. The variables are private to multiprocessing,
    and the same from Python 3.8 to 3.13; where they are not, a name stays what it was.
    """
    if not _prefix():
        return
    prefix = "/" + _prefix()
    if hasattr(shared_memory, "_SHM_NAME_PREFIX") and hasattr(shared_memory, "_SHM_SAFE_NAME_LENGTH"):
        vars(shared_memory).update(_SHM_NAME_PREFIX=prefix, _SHM_SAFE_NAME_LENGTH=len(prefix) + RANDOM_DIGITS)
    configuration = getattr(current_process(), "_config", {})
    if "semprefix" in configuration:
        configuration["semprefix"] = prefix.rstrip("-")  # to which it adds a dash


def mark_communicators() -> None:
    """The same for the memory in which workers on CPUs add up their parts. In a worker, before it makes any."""
    from vllm.distributed.device_communicators import cpu_communicator

    own = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    if own is None or not _prefix():
        return
    named = own.make_group_name
    own.make_group_name = staticmethod(lambda communicator: _prefix() + named(communicator))


def forget_names() -> None:
    """Of the queues that this process made, and of its communicators. To be called when all processes of the engine are
    ready, and have opened them."""
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    _forget_communicators()

    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()  # what vLLM has frozen is not listed
    for found in gc.get_objects():
        if type(found) is ShmRingBuffer and found.is_creator:
            found.shared_memory.unlink()
            found.is_creator = False  # it would unlink it again at its end
    if frozen:
        gc.freeze()


def _forget_communicators() -> None:
    """Every worker takes away whatever of its engine is left."""
    engine = os.environ.get("VLLM_DIST_IDENT")
    if not engine or not os.path.isdir(SHARED_MEMORY):
        return
    for name in os.listdir(SHARED_MEMORY):
        if COMMUNICATOR in name and f"{engine}-" in name:
            with suppress(FileNotFoundError):  # another worker was first
                os.unlink(os.path.join(SHARED_MEMORY, name))


def _prefix() -> str:
    """Of this life's names; empty without a supervisor."""
    supervisor, incarnation = os.environ.get(death.SUPERVISOR), os.environ.get(death.INCARNATION)
    return memory_prefix(supervisor, incarnation) if supervisor and incarnation else ""
