"""This host: limits, shared memory, clock, libraries. Each line is one look; nothing is changed."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

import psutil
import zmq

from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.limits import Limits
from cosmos_actor.cli.examination.causes import Mark, Observation
from cosmos_actor.cli.examination.reach import ELSEWHERE, route

GIB, MIB = 2**30, 2**20
ENOUGH_DESCRIPTORS = 4096
"""A head needs about ten for each actor, a thousand actors ten thousand; below this a few hundred are the end."""
ENOUGH_SHM_BYTES = 512 * MIB
"""NCCL and torch's data loaders keep their buffers there; a container has 64 MiB unless told otherwise."""
CHILD_S = 10.0
"""A Python that does not start in this time is broken, or the host is."""
STA_UNSYNC = 0x40
"""adjtimex(2): the kernel's clock follows no other."""
CHILD = """
import os, sys
fd = os.memfd_create("doctor")
os.write(fd, b"child")
with open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", "rb") as theirs:
    assert theirs.read() == b"parent"
print(fd, flush=True)
sys.stdin.read()
"""


def this_host() -> Iterator[Observation]:
    """All of it, in a fixed order."""
    for look in (descriptors, locked_memory, shm, memfd, ptrace_scope, clock, libzmq, python, numpy, uvloop, memory,
                 cores, default_route):
        yield look()


def judged(what: str, mark: Mark, value: str, cure: str, setting: str) -> Observation:
    """The cure belongs to the line only if it is not ok."""
    return Observation(what, mark, value) if mark == "ok" else Observation(what, mark, value, cure, setting)


def limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def descriptors() -> Observation:
    """The bus raises the soft limit to the hard one (bus/socket.py), so that the hard one counts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    mark: Mark = "bad" if most < Limits().min_descriptors else "warn" if most < ENOUGH_DESCRIPTORS else "ok"
    return judged("RLIMIT_NOFILE", mark, f"{limit(soft)}, may be raised to {limit(hard)}",
                  "`ulimit -Hn 65536`, LimitNOFILE= of the service, or nofile in limits.conf", "bus.min_descriptors")


def locked_memory() -> Observation:
    """Counts only where a network card reads memory itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/sys/class/infiniband")
    cards = infiniband.is_dir() and any(infiniband.iterdir())
    mark: Mark = "warn" if cards and soft != resource.RLIM_INFINITY else "ok"
    value = limit(soft) if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    return judged("RLIMIT_MEMLOCK", mark, value + ("" if cards else "; no InfiniBand card here needs it"),
                  "`ulimit -l unlimited`: NCCL over InfiniBand locks its buffers", "memlock in limits.conf")


def shm() -> Observation:
    """Not for the bulk plane, whose memory has no file system: for NCCL, torch, and for telling hosts apart."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Observation("/dev/shm", "bad", f"{error.strerror}", "mount a tmpfs there", "/dev/shm")
    return judged("/dev/shm", "warn" if usage.free < ENOUGH_SHM_BYTES else "ok",
                  f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free",
                  "give the container more (`--shm-size`, an emptyDir of medium Memory), or remove what lies there: "
                  "NCCL and torch use it", "--shm-size")


def memfd() -> Observation:
    """What the bulk plane and the lane do: each of two processes opens a descriptor of the other."""
    what = "memfd, /proc/PID/fd"
    try:
        fd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Observation(what, "bad", f"memfd_create: {error.strerror}", "arrays have no memory to lie in: allow "
                           "memfd_create in the seccomp profile", "security_opt")
    try:
        os.write(fd, b"parent")
        trouble = _open_each_other(fd)
    finally:
        os.close(fd)
    return judged(what, "warn" if trouble else "ok", trouble or "two processes open each other's memory",
                  "run the actors of a host as one user, without hidepid; until then all goes over the socket",
                  "bus.shared_bytes")


def _open_each_other(fd: int) -> str:
    """What went wrong, or nothing."""
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), str(fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as child:
        try:
            assert child.stdout is not None
            theirs = child.stdout.readline().strip()
            if not theirs:
                return "a child can not open ours: " + child.communicate(timeout=CHILD_S)[1].strip().splitlines()[-1]
            return "" if Path(f"/proc/{child.pid}/fd/{theirs}").read_bytes() == b"child" else "the bytes are others"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"we can not open a child's: {error}"
        finally:
            child.kill()


def ptrace_scope() -> Observation:
    """Yama restricts debuggers; what the lane does needs less, and is not concerned."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return Observation("ptrace scope", "ok", "no Yama here: debuggers may attach to what this user runs")
    meaning = {0: "debuggers may attach", 1: "debuggers attach to their own children only",
               2: "only root attaches debuggers", 3: "nobody attaches a debugger until the next boot"}
    return judged("ptrace scope", "warn" if scope >= 3 else "ok", f"{scope}: {meaning.get(scope, 'unknown')}",
                  "py-spy and gdb will not work on a stuck actor", "kernel.yama.ptrace_scope")


def clock() -> Observation:
    """Deadlines use the monotonic clock; logs and ledgers of two hosts meet in the other."""
    info = time.get_clock_info("monotonic")
    if not info.monotonic:
        return Observation("clock", "bad", f"{info.implementation} may go back", "deadlines can not be kept here",
                           "clocksource")
    synchronised = _kernel_is_synchronised()
    word = {True: "synchronised", False: "not synchronised", None: "unknown whether it is synchronised"}[synchronised]
    return judged("clock", "ok" if synchronised else "warn", f"{word}; monotonic to {info.resolution:g} s",
                  "run chrony or systemd-timesyncd; a container has its host's clock", "NTP")


def _kernel_is_synchronised() -> bool | None:
    """What adjtimex(2) says, asked without changing anything; None: it is not allowed here."""
    answer = (ctypes.c_long * 64)()  # struct timex has 208 bytes on 64-bit Linux; `status` is an int after five longs
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(answer))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else not answer[5] & STA_UNSYNC


def libzmq() -> Observation:
    value = f"{zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    if not zmq.has("curve"):
        return Observation("libzmq", "bad", f"{value}, without CURVE", "install pyzmq from a wheel: its libzmq has "
                           "CURVE", "pyzmq")
    mark: Mark = "ok" if zmq.zmq_version_info() >= (4, 3) else "warn"
    return judged("libzmq", mark, f"{value}, with CURVE", "4.3 is what the suite runs with: upgrade pyzmq", "pyzmq")


def python() -> Observation:
    return Observation("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def numpy() -> Observation:
    version = metadata.version("numpy")
    old = tuple(map(int, version.split(".")[:2])) < (1, 22)
    return judged("numpy", "warn" if old else "ok", version, "1.22 is the oldest that is tested", "numpy")


def uvloop() -> Observation:
    if util.find_spec("uvloop") is None:
        return Observation("uvloop", "ok", "not installed: asyncio's own loop is used; pip install uvloop is faster")
    return Observation("uvloop", "ok", metadata.version("uvloop"))


def memory() -> Observation:
    """What is free for this process: of the machine, and of its control group."""
    free, whose = psutil.virtual_memory().available, "of the machine"
    for usage, most in (("memory.current", "memory.max"), ("memory/memory.usage_in_bytes",
                                                            "memory/memory.limit_in_bytes")):
        left = _cgroup_number(most) - _cgroup_number(usage)
        if left < free:
            free, whose = left, "of this control group"
    budget = BulkSettings().budget_bytes
    return judged("memory", "warn" if free < 2 * budget else "ok", f"{free / GIB:.1f} GiB free, {whose}",
                  f"an actor may keep {budget / GIB:g} GiB of arrays: lower it, or give the host more",
                  "bulk.budget_bytes")


def _cgroup_number(name: str) -> float:
    """A figure of the control group, infinity where there is none."""
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
        return float("inf") if text == "max" else float(text)
    except (OSError, ValueError):
        return float("inf") if "max" in name or "limit" in name else 0.0


def cores() -> Observation:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    share = _cpu_quota()
    value = f"{usable} of {there} usable" + (f", {share:g} by the control group's quota" if share < usable else "")
    few = min(usable, share) < 2
    return judged("cores", "warn" if few else "ok", value, "a job's processes take turns on one: use --inproc",
                  "run.grouping")


def _cpu_quota() -> float:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


def default_route() -> Observation:
    """Whether other hosts can be reached at all."""
    way = route(ELSEWHERE, 9)
    if way.mark == "bad":
        return Observation("default route", "warn", "none: only this host and its own networks can be reached",
                           "name the address of the interface that the others reach", "bus.host")
    return Observation("default route", "ok", way.value.partition(" is reached ")[2])
