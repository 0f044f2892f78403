"""A section made from a dataclass has its fields, defaults, reasons and refusals."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from cosmos_actor.recipes.mirror import as_dataclass, field_docstrings, section_of_dataclass


@dataclass(frozen=True)
class Pump:
    """A pump."""

    pressure_s: float = 2.0
    """Seconds of pressure:
    longer bursts the hose."""

    valves: int = 3

    first_s: float = 1.0
    last_s: float = 2.0
    """Both ends of a pause."""

    def __post_init__(self) -> None:
        if self.valves == 13:
            raise RuntimeError("13 valves bring bad luck")


Section = section_of_dataclass(Pump, "Section")


def test_fields_defaults_units_and_reasons_are_the_owners() -> None:
    assert list(Section.model_fields) == ["pressure_s", "valves", "first_s", "last_s"]
    field = Section.model_fields["pressure_s"]
    assert (field.default, field.description) == (2.0, "Seconds of pressure: longer bursts the hose.")
    assert field.json_schema_extra == {"unit": "s", "resumable": True}


def test_the_section_turns_into_the_owners_object() -> None:
    assert as_dataclass(Section(valves=5), Pump) == Pump(2.0, 5)


def test_what_the_owner_refuses_is_refused_with_its_words() -> None:
    with pytest.raises(ValidationError, match="13 valves bring bad luck"):
        Section(valves=13)


def test_a_field_without_a_string_under_it_has_no_reason() -> None:
    assert "valves" not in field_docstrings(Pump)


def test_fields_on_consecutive_lines_share_the_string_under_the_last() -> None:
    reasons = field_docstrings(Pump)
    assert reasons["first_s"] == reasons["last_s"] == "Both ends of a pause."
