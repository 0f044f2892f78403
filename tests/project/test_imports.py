"""Which part may import what, read from the source and checked again in real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.project.source import Import, Module, calls, imports, modules

BELOW = {
    "": set(),
    "python_versions": set(),
    "death": set(),
    "bus": set(),
    "simulator_bridge": {"bus"},
    "actors": {"bus", "death", "python_versions"},
    "weight_plane": {"actors", "bus", "python_versions"},
    "trainer": {"weight_plane", "actors", "bus", "python_versions"},
    "roles": {"trainer", "weight_plane", "actors", "bus", "python_versions"},
    "tasks": {"roles", "actors", "bus", "python_versions"},
    "recipes": {"tasks", "roles", "trainer", "weight_plane", "actors", "bus", "simulator_bridge", "python_versions"},
}
"""part -> the parts that it may import. `job` and `cli` stand on top and may import all."""
ON_TOP = ("job", "cli")
SIMULATORS_SIDE = ("bus", "simulator_bridge")
SIMULATORS_LIBRARIES = {"numpy", "zmq", "msgpack"}
REFUSED = {"ray", "redis", "pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
COMPUTE = {"torch", "transformers", "safetensors", "vllm"}


def all_imports() -> list[tuple[Module, Import]]:
    return [(module, found) for module in modules() for found in imports(module)]


def part_of(target: str) -> str:
    parts = target.split(".")
    return parts[1] if parts[0] == "cosmos_actor" and len(parts) > 1 else ""


def test_imports_go_one_way() -> None:
    wrong = [
        f"{found.place}: {module.part} may not import {part_of(found.target)}"
        for module, found in all_imports()
        if module.part not in ON_TOP and part_of(found.target) not in BELOW[module.part] | {module.part, ""}
    ]
    assert wrong == []


def test_every_part_has_its_place_in_the_order() -> None:
    assert {module.part for module in modules()} <= {*BELOW, *ON_TOP}


def test_the_simulators_side_needs_three_libraries() -> None:
    foreign = [
        f"{found.place}: {found.target}"
        for module, found in all_imports()
        if module.part in (*SIMULATORS_SIDE, "death", "python_versions", "")
        if (top := found.target.split(".")[0]) not in SIMULATORS_LIBRARIES | {"cosmos_actor"} | sys.stdlib_module_names
        if not (top == "typing_extensions" and _only_for_types(module, found))
    ]
    assert foreign == []


def _only_for_types(module: Module, found: Import) -> bool:
    source = module.path.read_text().splitlines()
    above = source[: int(found.place.rpartition(":")[2]) - 1]
    return any(line.startswith("if TYPE_CHECKING:") for line in above[-6:])


@pytest.mark.parametrize("refused", sorted(REFUSED))
def test_nothing_imports(refused: str) -> None:
    found = [item.place for _, item in all_imports() if item.target.split(".")[0].strip("_") == refused]
    assert found == []


def test_nothing_is_evaluated_or_unpickled() -> None:
    found = [
        f"{module.place(call)}: {name}"
        for module in modules()
        for name, call in calls(module)
        if name in ("eval", "exec", "builtins.eval", "builtins.exec")
        or any(key.arg == "allow_pickle" and getattr(key.value, "value", True) for key in call.keywords)
        or any(key.arg == "weights_only" and not getattr(key.value, "value", False) for key in call.keywords)
    ]
    assert found == []


def test_one_file_makes_sockets() -> None:
    found = [
        f"{module.place(call)}: {name}"
        for module in modules()
        if module.name != "cosmos_actor.bus.socket"
        for name, call in calls(module)
        if name in ("zmq.Context", "zmq.Context.instance", "zmq.asyncio.Context", "Context.instance", "zmq.Socket")
        or name.endswith(".socket") and name.split(".")[0] in ("zmq", "context", "ctx")
    ]
    found += [
        f"{item.place}: {item.target}"
        for module, item in all_imports()
        if item.target.startswith(("zmq.asyncio", "zmq.green", "zmq.auth.thread", "zmq.auth.asyncio", "zmq.devices"))
    ]
    assert found == []


LOADED_BY = """
import importlib, json, sys
import numpy, zmq, msgpack, ctypes, asyncio, concurrent.futures
names = json.loads(sys.argv[1])
before = set(sys.modules)
for name in names:
    importlib.import_module(name)
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def loaded_by(names: list[str]) -> set[str]:
    """Top-level packages in a fresh process after importing these modules, beyond those of numpy, zmq and msgpack."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY, json.dumps(names)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_a_process_that_loads_the_simulators_side_has_nothing_else() -> None:
    loaded = loaded_by([module.name for module in modules() if module.part in SIMULATORS_SIDE])
    assert loaded - {"cosmos_actor"} - SIMULATORS_LIBRARIES - sys.stdlib_module_names == set()


def test_settings_command_line_and_processes_load_no_torch() -> None:
    light = [module for module in modules() if module.part in ("bus", "cli", "actors") or "settings" in module.name]
    assert loaded_by([module.name for module in light]) & COMPUTE == set()


def test_only_parts_that_compute_import_torch_when_loaded() -> None:
    found = [
        f"{item.place}: {item.target}"
        for module, item in all_imports()
        if item.target.split(".")[0] in COMPUTE and not item.deferred and module.part not in ("trainer", "roles")
    ]
    assert found == []
