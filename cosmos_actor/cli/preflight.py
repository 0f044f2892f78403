"""What can be known to be wrong before anything starts. Imports no torch; the slowest check starts an interpreter.

Each check returns what it found to be right, or raises a UserError.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path

from cosmos_actor.actors.errors import (
    BadValue,
    NotFound,
    RunDirectoryBusy,
    RunDirectoryMismatch,
    RunDirectoryUnusable,
    UserError,
)
from cosmos_actor.actors.run_directory import RunPaths
from cosmos_actor.bus.errors import DescriptorLimit
from cosmos_actor.bus.socket import check_descriptors
from cosmos_actor.cli.preflight_nodes import simulators_on_nodes
from cosmos_actor.recipes.plan import plan, takes_turns
from cosmos_actor.recipes.settings import RunSettings
from cosmos_actor.roles.engines import VLLM
from cosmos_actor.roles.plugins import REGISTRIES
from cosmos_actor.simulator_bridge.messages import SIMULATOR
from cosmos_actor.simulator_bridge.mistakes import Mistake
from cosmos_actor.simulator_bridge.plugins import SimulatorName
from cosmos_actor.trainer.adapter_targets import check_targets, linear_layers
from cosmos_actor.trainer.model_directory import attention_heads, check_model_files
from cosmos_actor.weight_plane.transports.file_systems import LOCAL, DirectoryUnusable, files_at

INTERPRETER_DEADLINE_S, SIMULATOR_DEADLINE_S, PLUG_IN_DEADLINE_S = 20.0, 60.0, 60.0
"""An interpreter that takes longer to import the bus is broken, and a check must end."""
TASKS_SHOWN = 5
FIND_VLLM = "import importlib.util, sys; importlib.util.find_spec('vllm') or sys.exit('there is no module vllm')"
NEEDS_TORCH = ("policy", "rollout", "reference", "critic")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `line` says what was found, or what is wrong."""

    what: str
    ok: bool
    line: str


def preflight(settings: RunSettings, run_directory: Path | None, *, resume: bool = False, inproc: bool = False,
              interpreters: bool = True) -> list[Finding]:
    """All findings, in a fixed order. `run_directory` None: the run gets a fresh one; `inproc`: it opens no socket."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("placement", lambda: placement(settings)),
        *([] if settings.run.experience == SIMULATOR else [
            ("model", lambda: model(settings)),
            ("task", lambda: task(settings)),
        ]),
        ("loop", lambda: loop(settings)),
        ("run directory", lambda: free_run_directory(run_directory, resume=resume)),
        ("bus address", lambda: bindable(settings.bus.host, settings.bus.port)),
        *([("simulators' address", lambda: doors(settings))] if _has_doors(settings, inproc=inproc) else []),
        ("libraries", lambda: libraries(settings)),
        *([("weights.directory", lambda: weights_directory(settings))] if settings.weights.directory else []),
    ]
    if not inproc:
        checks.append(("descriptors", lambda: descriptors(settings.bus.min_descriptors)))
    if interpreters:
        if settings.run.experience != SIMULATOR and settings.rollout.engine == VLLM:
            checks.append(("engine", lambda: vllm(settings, inproc=inproc)))
        checks += [("interpreter", partial(interpreter, asked)) for asked in interpreters_of(settings)]
        checks += [("plug-in", partial(plug_in, asked)) for asked in plug_ins_of(settings, inproc=inproc)]
        if settings.run.experience == SIMULATOR and settings.sim.count:
            elsewhere = settings.sim.through and not inproc
            checks.append(("simulator", lambda: simulators_on_nodes(settings, TASKS_SHOWN) if elsewhere else
                           simulator(settings, inproc=inproc)))
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return list(pool.map(lambda check: _look(*check), checks))


def _look(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, check())
    except UserError as error:
        return Finding(what, False, str(error))


def placement(settings: RunSettings) -> str:
    placed = plan(settings)
    processes = len({actor.process for actor in placed.actors}) + (placed.grouping == "per_role")
    turns = ", policy and rollout have their GPU in turn" if takes_turns(settings, placed) else ""
    return f"{placed.grouping} x {placed.placement}: {len(placed.actors) + 1} actors in {processes} processes{turns}"


def model(settings: RunSettings) -> str:
    name = settings.policy.model
    check_model_files(name)
    if settings.policy.lora.rank and (linear := linear_layers(name)) is not None:
        check_targets(linear, settings.policy.lora.targets)
    return name


def task(settings: RunSettings) -> str:
    name = settings.data.task
    _need_object(name if ":" in name else f"cosmos_actor.tasks.{name}", "data.task")
    if name == "reasoning_gym":
        _need_module("reasoning_gym", "data.task")
    return name


def loop(settings: RunSettings) -> str:
    name = settings.run.loop
    _need_object(name if ":" in name else f"cosmos_actor.recipes.{name}", "run.loop")
    return name


def _need_object(path: str, setting: str) -> None:
    """That there is a module, and that its source has the name after the colon, if there is one."""
    module_name, _, name = path.partition(":")
    spec = _need_module(module_name, setting)
    if name and not _may_define(spec, name):
        raise NotFound(f"{module_name} has no `{name}`", setting=setting)


def _need_module(name: str, setting: str) -> ModuleSpec:
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    except Exception as error:  # whatever the packages around a person's own module raise: they are imported for it
        raise NotFound(f"{name} can not be loaded: {error!r}", setting=setting) from error
    if found is None:
        raise NotFound(f"there is no module {name}", setting=setting)
    return found


def _may_define(spec: ModuleSpec, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether the module's source has the name where a definition of it would. Nothing is imported: it may be torch.

    A source that can not be read has the benefit of the doubt.
    """
    if spec.name in sys.modules:
        return hasattr(sys.modules[spec.name], name)
    try:
        tree = ast.parse(Path(str(spec.origin)).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return True
    nodes = list(ast.walk(tree))
    sources = [source for source in _taken_whole(nodes, spec) if source.name not in seen]
    return any(_defines(node, name) for node in nodes) or any(
        _may_define(source, name, seen | {spec.name}) for source in sources)


def _defines(node: ast.AST, name: str) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name in (name, "__getattr__")
        case ast.Name(ctx=ast.Store()):
            return node.id == name
        case ast.alias():
            return (node.asname or node.name.partition(".")[0]) == name
        case _:
            return False


def _taken_whole(nodes: list[ast.AST], spec: ModuleSpec) -> list[ModuleSpec]:
    """The modules of `from … import *`."""
    names = [importlib.util.resolve_name("." * node.level + (node.module or ""), spec.parent) for node in nodes
             if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    return [found for name in names if name != spec.name and (found := importlib.util.find_spec(name)) is not None]


def libraries(settings: RunSettings) -> str:
    """torch, transformers, peft for an adapter: where this interpreter plays a role that computes. Looked for only."""
    here = [role for role in NEEDS_TORCH if getattr(settings, role).python is None]
    names = ("torch", "transformers", *(("peft",) if settings.policy.lora.rank else ()))
    missing = [name for name in names if importlib.util.find_spec(name) is None] if here else []
    if missing:
        raise NotFound(f"{' and '.join(missing)} not installed, {', '.join(here)} need it: "
                       "pip install 'cosmos-actor[train]'")
    return ", ".join(names) if here else "none needed here"


def weights_directory(settings: RunSettings) -> str:
    """That versions can be written there: by this host's user, or by what fsspec finds for the URL."""
    url = settings.weights.directory
    if "://" in url and not url.startswith(LOCAL):
        try:
            files_at(url)
        except DirectoryUnusable as error:
            raise NotFound(error.text, setting="weights.directory") from None
    else:
        _need_writable(Path(url.removeprefix(LOCAL)), "weights.directory")
    return url


def free_run_directory(directory: Path | None, *, resume: bool = False) -> str:
    if directory is None:
        return "a fresh one below runs/"
    paths = RunPaths(directory)
    owner = paths.owner_pid()
    if owner is not None:
        raise RunDirectoryBusy(f"{directory} is in use by process {owner}; stop it or name another directory",
                               setting="run.run_dir")
    if resume:
        RunPaths.of_run(directory)
    elif paths.identity.exists():
        raise RunDirectoryMismatch(f"{directory} holds a run already; go on with it by --resume or name another "
                                   "directory", setting="run.run_dir")
    elif paths.root.exists() and not paths.root.is_dir():
        raise RunDirectoryMismatch(f"{directory} is a file, not a directory", setting="run.run_dir")
    _need_writable(paths.root)
    return str(directory)


def _need_writable(directory: Path, setting: str = "run.run_dir") -> None:
    """That the directory, or the one it would be made in, can be written: permissions say so of /proc, too."""
    nearest = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise RunDirectoryUnusable(f"{nearest} can not be written", setting=setting)
    try:
        tempfile.TemporaryFile(dir=nearest).close()  # without a name, where the file system can
    except OSError as error:
        raise RunDirectoryUnusable(f"{nearest} can not be written: {error.strerror}", setting=setting) from error


def _has_doors(settings: RunSettings, *, inproc: bool) -> bool:
    """Whether there are ports to look at; with `sim.through` the simulators' check opens the first to its nodes."""
    sim = settings.sim
    wanted = settings.run.experience == SIMULATOR and sim.port and settings.rollout.count
    return bool(wanted) and not (inproc or sim.count and sim.through)


def doors(settings: RunSettings) -> str:
    """Where simulators can attach: a port for each rollout."""
    return ", ".join(bindable(settings.bus.host, settings.sim.port + at, "sim.port")
                     for at in range(settings.rollout.count))


def bindable(host: str, port: int, setting: str = "bus.port") -> str:
    """That this host has the address and nobody listens at the port now, which `setting` names."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        name = "bus.host" if isinstance(error, socket.gaierror) or not port else setting
        raise UserError(f"can not listen at tcp://{host}:{port}: {error.strerror or error}", setting=name) from error
    return f"tcp://{host}:{port or 'any free port'}"


def descriptors(wanted: int) -> str:
    """That a bus may open as many as it needs. Raises the soft limit, which what is started later inherits."""
    try:
        return str(check_descriptors(wanted))
    except DescriptorLimit as error:
        raise UserError(error.text, setting=error.setting) from error


@dataclass(frozen=True)
class Interpreter:
    """A Python that plays some roles, with the environment they add."""

    python: str
    env: tuple[tuple[str, str], ...]
    roles: tuple[str, ...]


def interpreters_of(settings: RunSettings) -> list[Interpreter]:
    """Each interpreter and environment of this host once; the roles that run in this very Python come first."""
    roles: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {(sys.executable, ()): []}
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        if hasattr(section, "python") and not getattr(section, "through", ()):
            roles.setdefault((section.python or sys.executable, tuple(sorted(section.env.items()))), []).append(name)
    return [Interpreter(python, env, tuple(names)) for (python, env), names in roles.items() if names]


def interpreter(asked: Interpreter) -> str:
    """That it exists and imports the bus, as its roles will: cosmos-actor is installed there, or on its PYTHONPATH."""
    setting = f"{asked.roles[0]}.python"
    if shutil.which(asked.python) is None:
        raise NotFound(f"there is no interpreter {asked.python}", setting=setting)
    if asked.python == sys.executable and not asked.env:
        return f"{asked.python}, which runs this: {', '.join(asked.roles)}"
    ended = _try_interpreter(asked, setting)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotFound(f"{asked.python} can not import cosmos_actor.bus: {last}", setting=setting)
    return f"{asked.python}, Python {ended.stdout.strip()}: {', '.join(asked.roles)}"


def vllm(settings: RunSettings, *, inproc: bool) -> str:
    """That the rollouts' interpreter has vLLM, and a process of its own to load it in. It takes long to import."""
    if inproc:
        raise UserError("rollout.engine = \"vllm\" wants a process of its own, since it changes torch for all in it: "
                        "without --inproc, or rollout.engine = \"torch\"", setting="rollout.engine")
    rollout = settings.rollout
    heads = attention_heads(settings.policy.model)
    if heads and heads % rollout.tensor_parallel:
        raise BadValue(f"rollout.tensor_parallel = {rollout.tensor_parallel} can not share the {heads} attention heads "
                       "of policy.model: they must be a multiple of it", setting="rollout.tensor_parallel")
    if not rollout.count:
        return "vllm, where rollouts join from"
    asked = Interpreter(rollout.python or sys.executable, tuple(sorted(rollout.env.items())), ("rollout",))
    if shutil.which(asked.python) is None:
        return "vllm"  # that there is no such interpreter is another finding
    ended = _run_there(asked, FIND_VLLM, "rollout.python")
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotFound(f"rollout.engine = \"vllm\" needs vLLM in {asked.python}: {last}", setting="rollout.python")
    return f"vllm, of {asked.python}"


def simulator(settings: RunSettings, *, inproc: bool) -> str:
    """That the simulator which the job is to start can be loaded where it will run, and says what it is."""
    sim = settings.sim
    try:
        name = str(SimulatorName.parse(sim.kind, sim.options))
        python = sys.executable if inproc else sim.python or sys.executable
        command = [python, "-m", "cosmos_actor.cli", "sim", "describe", name, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              env={**os.environ, **sim.env}, timeout=SIMULATOR_DEADLINE_S)
        if done.returncode == 0:
            tasks = [str(task["name"]) for task in json.loads(done.stdout)["tasks"]]
            return f"{sim.kind}: {len(tasks)} task{'s' * (len(tasks) > 1)}, {', '.join(tasks[:TASKS_SHOWN])}"
    except Mistake as error:
        raise NotFound(str(error), setting="sim.kind") from error
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{sim.kind} does not describe itself: {error}", setting="sim.kind") from error
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise NotFound(f"{sim.kind} can not be loaded by {command[0]}: {last.removeprefix('error: ')}", setting="sim.kind")


@dataclass(frozen=True)
class PlugIn:
    """A name in settings, and the Python that will load what it names."""

    setting: str
    name: str
    python: str
    env: tuple[tuple[str, str], ...] = ()


def plug_ins_of(settings: RunSettings, *, inproc: bool) -> list[PlugIn]:
    """Those that are not built in: sinks are the controller's, in this Python, the others the rollouts' that this host
    starts. A rollout that joins from elsewhere loads what is installed there."""
    sim, rollout = settings.sim, settings.rollout
    if settings.run.experience != SIMULATOR:
        return []
    named = [PlugIn("sim.sinks", name, sys.executable) for name in sim.sinks]
    if rollout.count or inproc:
        python, env = (sys.executable, {}) if inproc else (rollout.python or sys.executable, rollout.env)
        named += [PlugIn(setting, name, python, tuple(sorted(env.items())))
                  for setting, name in (("sim.source", sim.source), ("sim.driver", sim.driver))]
    return [asked for asked in named if asked.name not in REGISTRIES[asked.setting].built_in]


def plug_in(asked: PlugIn) -> str:
    """That it can be loaded where it will be, and called. It is imported there, in a process of its own."""
    command = [asked.python, "-m", "cosmos_actor.roles.plugins", f"{asked.setting}={asked.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              env={**os.environ, **dict(asked.env)}, timeout=PLUG_IN_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{asked.name} can not be looked for by {asked.python}: {error}",
                       setting=asked.setting) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotFound(last.removeprefix("error: "), setting=asked.setting)
    return f"{asked.name} ({asked.setting})"


def _try_interpreter(asked: Interpreter, setting: str) -> subprocess.CompletedProcess[str]:
    return _run_there(asked, "import cosmos_actor.bus, platform; print(platform.python_version())", setting)


def _run_there(asked: Interpreter, code: str, setting: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([asked.python, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                              env={**os.environ, **dict(asked.env)}, timeout=INTERPRETER_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFound(f"{asked.python} does not run: {error}", setting=setting) from error
