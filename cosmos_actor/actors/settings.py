"""The base that every settings class shares: frozen, closed to unknown keys, one line a field with unit and reason.

Importable without torch. A field is declared with `setting`, so that `check --explain` can show why it exists.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Settings of one owner. They can not be changed after they were made, and an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


def setting(default: Any, why: str, *, unit: str = "", resumable: bool = False, **limits: Any) -> Any:
    """A field with its reason. `resumable`: a resumed run may change it, because it does not touch what is computed."""
    extra = {"unit": unit, "resumable": resumable}
    if isinstance(default, (dict, list)) or callable(default):
        factory = default if callable(default) else default.copy
        return Field(default_factory=factory, description=why, json_schema_extra=extra, **limits)
    return Field(default, description=why, json_schema_extra=extra, **limits)
