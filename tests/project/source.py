"""The package's source as data: which module imports what, and which calls it makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cosmos_actor"


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def part(self) -> str:
        """The folder (or file) under cosmos_actor that this belongs to; "" for cosmos_actor itself."""
        return self.name.split(".")[1] if "." in self.name else ""

    def place(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    target: str
    place: str
    deferred: bool
    """Inside a function: it costs nothing until that function runs."""
    for_types: bool
    """Under `if TYPE_CHECKING:`: never executed."""


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, parsed."""
    return tuple(_module(path) for path in sorted(PACKAGE.rglob("*.py")))


def _module(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text()))


def imports(module: Module) -> Iterator[Import]:
    """Every import statement, absolute: `from . import errors` in cosmos_actor.bus gives cosmos_actor.bus.errors."""
    known = {other.name for other in modules()}
    for node, deferred, for_types in _walk(module.tree, False, False):
        place = module.place(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, place, deferred, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in known else base, place, deferred, for_types)


def _walk(node: ast.AST, deferred: bool, for_types: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node below, with whether it is inside a function and whether it is only for the type checker."""
    checked = node.body if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING") else []
    for child in ast.iter_child_nodes(node):
        mine = for_types or child in checked
        yield child, deferred, mine
        yield from _walk(child, deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef), mine)


def _base(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def calls(module: Module) -> Iterator[tuple[str, ast.Call]]:
    """(dotted name, node) of every call whose callee is a plain dotted name."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            yield name, node


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
