"""Whatever bytes come: a typed error or a message, no more memory than declared, no hang. Many: `-m tests.fuzz`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import NAMES, case, fuzzing, seeded

EXAMPLES = 200


@pytest.fixture(autouse=True, scope="module")
def traced() -> Iterator[None]:
    with fuzzing():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_no_input_breaks(name: str) -> None:
    """The first seeds of `python -m tests.fuzz`."""
    for seed in range(EXAMPLES):
        case(name).try_one(seeded(name, seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(choose=st.randoms(use_true_random=False))
def test_no_input_breaks_that_a_search_finds(name: str, choose: random.Random) -> None:
    """Hypothesis makes the choices, and makes an input that breaks something small."""
    case(name).try_one(choose)
