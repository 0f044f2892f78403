"""Which part may import what, read from the source and checked again in real processes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.project.source import Import, Module, calls, imports, modules

BASE = {"", "python_versions", "death"}
BELOW = {
    "bus": set(),
    "simulator_bridge": {"bus"},
    "actors": {"bus"},
    "weight_plane": {"actors", "bus", "simulator_bridge"},
    "trainer": {"weight_plane", "actors", "bus", "simulator_bridge"},
    "roles": {"trainer", "weight_plane", "actors", "bus", "simulator_bridge"},
    "tasks": {"roles", "actors", "bus"},
    "recipes": {"tasks", "roles", "trainer", "weight_plane", "actors", "bus", "simulator_bridge"},
    "job": {"recipes", "tasks", "roles", "trainer", "weight_plane", "actors", "bus", "simulator_bridge"},
    "loop": {"job", "recipes", "tasks", "roles", "trainer", "weight_plane", "actors", "bus", "simulator_bridge"},
    "cli": {"job", "recipes", "tasks", "roles", "trainer", "weight_plane", "actors", "bus", "simulator_bridge"},
}
"""part -> the parts that it may import. A loop is a module of recipes/ that runs a job: it is named in settings, and
nobody imports it. The other modules of recipes/ are the settings that a job is made from."""
SIMULATORS_SIDE = ("bus", "simulator_bridge")
SIMULATORS_LIBRARIES = {"numpy", "zmq", "msgpack"}
REFUSED = {"ray", "redis", "pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
COMPUTE = {"torch", "transformers", "safetensors", "vllm"}
ON_DEVICES = {f"cosmos_actor.weight_plane.{name}" for name in
              ("device_digest", "device_delta", "device_kernel", "device_publisher", "flat", "flat_pool", "flat_store",
               "transports.flat_giving", "transports.handles", "transports.mapped", "transports.pair",
               "transports.paired")}
# What the weight plane does with tensors of torch; only who computes loads it, and only where it is needed.


def all_imports() -> list[tuple[Module, Import]]:
    return [(module, found) for module in modules() for found in imports(module)]


def part_of(name: str) -> str:
    """The key of `BELOW` for a module's dotted name; "" for what is not of this package."""
    parts = name.split(".")
    if parts[0] != "cosmos_actor" or len(parts) == 1:
        return ""
    return "loop" if name in loops() else parts[1]


@cache
def loops() -> frozenset[str]:
    return frozenset(
        module.name
        for module in modules()
        if module.part == "recipes"
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in module.tree.body)
    )


def test_the_recipes_are_where_they_are_looked_for() -> None:
    assert "cosmos_actor.recipes.grpo" in loops()


def test_imports_go_one_way() -> None:
    wrong = [
        f"{found.place}: {part} may not import {part_of(found.target)}"
        for module, found in all_imports()
        if (part := part_of(module.name)) not in BASE
        if part_of(found.target) not in BELOW[part] | BASE | {part}
    ]
    assert wrong == []


def test_every_part_has_its_place_in_the_order() -> None:
    assert {part_of(module.name) for module in modules()} <= BASE | set(BELOW)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Over what is imported when a module loads: a circle there works or fails by who comes first."""
    graph = {
        module.name: {found.target for found in imports(module) if not found.deferred and not found.for_types}
        for module in modules()
    }
    assert list(circles(graph)) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "numpy"}, "c": {"a"}, "d": {"a", "d"}}
    assert list(circles(graph)) == [["a", "b", "c", "a"]]


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """The shortest way back to each module through modules later in the alphabet, so that each circle is found once."""
    for start in sorted(graph):
        ways = [[start]]
        seen: set[str] = set()
        for way in ways:
            for name in sorted(graph[way[-1]] & set(graph)):
                if name == start and len(way) > 1:
                    yield [*way, start]
                elif name > start and name not in seen:
                    seen.add(name)
                    ways.append([*way, name])


def test_the_simulators_side_needs_three_libraries() -> None:
    foreign = [
        f"{found.place}: {found.target}"
        for module, found in all_imports()
        if module.part in (*SIMULATORS_SIDE, "death", "python_versions", "")
        if (top := found.target.split(".")[0]) not in SIMULATORS_LIBRARIES | {"cosmos_actor"} | sys.stdlib_module_names
        if not (top == "typing_extensions" and found.for_types)
    ]
    assert foreign == []


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
    importable = json.dumps([name for name in names if not name.endswith("__main__")])
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY, importable], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_a_process_that_loads_the_simulators_side_has_nothing_else() -> None:
    loaded = loaded_by([module.name for module in modules() if module.part in SIMULATORS_SIDE])
    loaded.discard("__mp_main__")  # what multiprocessing calls the main module as well
    assert loaded - {"cosmos_actor"} - SIMULATORS_LIBRARIES - sys.stdlib_module_names == set()


def test_everything_but_trainer_and_roles_loads_without_torch() -> None:
    heavy = ("trainer", "roles")
    light = [module.name for module in modules() if module.name not in ON_DEVICES
             and (part_of(module.name) not in heavy or "settings" in module.name)]
    assert loaded_by(light) & COMPUTE == set()


def test_only_parts_that_compute_import_torch_when_loaded() -> None:
    found = [
        f"{item.place}: {item.target}"
        for module, item in all_imports()
        if item.target.split(".")[0] in COMPUTE and not item.deferred and not item.for_types
        and module.part not in ("trainer", "roles") and module.name not in ON_DEVICES
    ]
    assert found == []
