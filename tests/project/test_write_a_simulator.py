"""The page that tells how to write a simulator: its code is what `sim new` writes, and all of it passes the suite."""

from __future__ import annotations

import re
from typing import Any

from cosmos_actor.simulator_bridge.conformance import run
from cosmos_actor.simulator_bridge.new import package
from tests.project.source import ROOT

PAGE = ROOT / "docs" / "write-a-simulator.md"


def code_of_the_page() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_has_what_is_written() -> None:
    assert code_of_the_page()[0] == package("arena")["arena.py"]


def test_the_pages_worlds_that_step_together_pass() -> None:
    first, _, together = code_of_the_page()
    names: dict[str, Any] = {"__name__": "arena"}
    exec(first + together, names)
    assert [verdict for verdict in run(names["make_together"](), envs=3) if verdict.failed] == []


def test_the_pages_gymnasium_environment_passes() -> None:
    names: dict[str, Any] = {"__name__": "pendulum"}
    exec(code_of_the_page()[1], names)
    found = {verdict.check: verdict for verdict in run(names["make"](), steps=20)}
    assert [verdict for verdict in found.values() if verdict.failed] == []
    assert found["the embodiment fits"].seen == "pendulum"
