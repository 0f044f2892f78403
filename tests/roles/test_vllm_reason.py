"""What vLLM refuses a model for is told in its own words."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from cosmos_actor.roles.vllm_start import reason


class Config(BaseModel):
    parts: int

    @model_validator(mode="after")
    def _agree(self) -> Config:
        raise ValueError("Total number of attention heads (4) must be divisible by tensor parallel size (3).")


def test_the_input_that_pydantic_adds_is_left_out() -> None:
    with pytest.raises(ValidationError, match="input_value") as raised:
        Config(parts=3)
    assert reason(raised.value) == "Total number of attention heads (4) must be divisible by tensor parallel size (3)"


def test_any_other_error_is_its_text() -> None:
    assert reason(RuntimeError("no room.")) == "no room."
