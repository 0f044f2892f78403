from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cosmos_actor.python_versions import PythonTooOld, need
from tests.interpreters import require_python

ROOT = Path(__file__).parents[2]
MODERN = ("actors", "job", "recipes", "roles", "trainer", "weight_plane")


@pytest.mark.parametrize("version", [(3, 10, 0), (3, 11, 7), (4, 0, 0)])
def test_a_python_that_is_new_enough_passes(version: tuple[int, ...]) -> None:
    assert need("cosmos_actor.actors", version) is None  # type: ignore[func-returns-value]


def test_an_older_one_is_told_what_it_may_use() -> None:
    with pytest.raises(PythonTooOld) as caught:
        need("cosmos_actor.actors", (3, 9, 18))
    assert str(caught.value) == ("cosmos_actor.actors needs Python 3.10 or newer, this is 3.9; "
                                 "bus, simulator_bridge and the commands `attach` and `sim` run here")


def test_on_a_real_python_3_8_each_part_says_so_in_its_last_line() -> None:
    python38 = require_python("3.8")
    for part in MODERN:
        done = subprocess.run([python38, "-c", f"import cosmos_actor.{part}"], capture_output=True, text=True,
                              timeout=30, cwd=ROOT)
        assert done.returncode == 1
        assert f"cosmos_actor.{part} needs Python 3.10 or newer, this is 3.8;" in done.stderr.splitlines()[-1]


def test_death_is_importable_on_python_3_8() -> None:
    code = "from cosmos_actor import death; print(death.install())"
    done = subprocess.run([require_python("3.8"), "-c", code], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr
