"""A settings section made from a dataclass that another part owns.

`bus/` runs on Python 3.8 without pydantic, so its settings are dataclasses. A section made here has the same fields,
defaults, reasons and refusals as the dataclass, written down once, at the owner.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any, get_type_hints

from pydantic import create_model, model_validator

from cosmos_actor.actors.settings import Settings, setting

UNITS = {"_bytes": "bytes", "_s": "s", "_ms": "ms", "_us": "us", "_messages": "messages", "_chunks": "chunks"}


def section_of_dataclass(owner: type, name: str, *, base: type[Settings] = Settings) -> type[Settings]:
    """A frozen section with the fields of `owner`; values that the dataclass refuses are refused with its own words."""
    reasons, types = field_docstrings(owner), get_type_hints(owner)
    declared: dict[str, Any] = {
        field.name: (types[field.name], setting(field.default, reasons.get(field.name, ""), unit=unit_of(field.name),
                                                resumable=True))
        for field in dataclasses.fields(owner)
    }

    def refused_by_the_owner(section: Settings) -> Settings:
        try:
            as_dataclass(section, owner)
        except Exception as error:  # the owner's own error type; pydantic carries only ValueError
            raise ValueError(str(error)) from error
        return section

    validator: Any = model_validator(mode="after")(refused_by_the_owner)
    return create_model(name, __base__=base, __doc__=owner.__doc__, __validators__={"owner": validator}, **declared)


def as_dataclass(section: Settings, owner: type) -> Any:
    """The section's values as the owner's own object."""
    return owner(**{field.name: getattr(section, field.name) for field in dataclasses.fields(owner)})


def field_docstrings(owner: type) -> dict[str, str]:
    """Field name -> the string literal written under it, or under the last of the fields on consecutive lines."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    reasons: dict[str, str] = {}
    waiting: list[tuple[str, int]] = []
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            adjacent = waiting and waiting[-1][1] == statement.lineno - 1
            waiting = [*(waiting if adjacent else []), (statement.target.id, statement.lineno)]
            continue
        reasons.update({name: reason for name, _ in waiting if (reason := _text_of(statement))})
        waiting = []
    return reasons


def _text_of(statement: ast.stmt) -> str:
    """A string literal that stands alone, on one line; empty for any other statement."""
    constant = statement.value if isinstance(statement, ast.Expr) else None
    text = constant.value if isinstance(constant, ast.Constant) else None
    return " ".join(text.split()) if isinstance(text, str) else ""


def unit_of(name: str) -> str:
    """The unit a field's name ends with, or nothing."""
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")
