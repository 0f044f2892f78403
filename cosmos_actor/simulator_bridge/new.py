"""`cosmos-actor sim new`: a package for a simulator of one's own that attaches and passes `sim test` as it is."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Dict

from . import template
from .mistakes import Mistake
from .plugins import GROUP, kinds

PLACEHOLDER = "my_simulator"
NAMES = re.compile(r"[a-z][a-z0-9_]*")

PYPROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "my_simulator"
version = "0.1.0"
requires-python = ">=3.8"
dependencies = ["cosmos-actor", "numpy"]

[project.entry-points."{group}"]
my_simulator = "my_simulator:make"

[tool.setuptools]
package-dir = {{"" = "."}}  # so that `pip install -e` puts this folder on the path, before one that has it as a folder
py-modules = ["my_simulator"]
""".format(group=GROUP)

README = """\
# my_simulator

A simulator for cosmos-actor. Everything is in `my_simulator.py`. In an environment of its own (CPython 3.8 or newer):

```
pip install -e .
cosmos-actor sim test my_simulator:push
cosmos-actor attach my_simulator:push --connect tcp://HOST:PORT --key simulator.key --envs 8
```

The job prints the address and the key file where simulators attach to it. `cosmos-actor sim describe my_simulator:push`
tells what it can do; without installing it, its name is `python:my_simulator:make`, from this folder.
"""

TESTS = '''\
"""It keeps what is asked of a simulator."""

from cosmos_actor.simulator_bridge.conformance import run
from my_simulator import make


def test_it_keeps_the_contract() -> None:
    assert [verdict for verdict in run(make()) if verdict.failed] == []
'''


def new(name: str, folder: Path) -> Path:
    """Write the package into `folder`/`name`, whole or not at all. Raises Mistake."""
    checked_name(name)
    target = folder / name
    if target.exists():
        raise Mistake("{} is there already: name another, or another folder by --dir".format(target))
    if _is_a_module(name):
        raise Mistake("NAME {}: there is a module of this name here already; name another".format(name))
    try:
        made = Path(tempfile.mkdtemp(prefix=".{}-".format(name), dir=str(folder)))
    except OSError as error:
        raise Mistake("can not write into {}: {} (--dir)".format(folder, error.strerror)) from error
    try:
        for path, text in package(name).items():
            (made / path).parent.mkdir(exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        made.chmod(0o755)
        made.rename(target)
    except OSError as error:
        shutil.rmtree(str(made), ignore_errors=True)
        raise Mistake("can not write {}: {} (--dir)".format(target, error.strerror)) from error
    return target


def checked_name(name: str) -> None:
    """Raises Mistake for what can be no module here, or no kind of simulator."""
    if not NAMES.fullmatch(name) or keyword.iskeyword(name):
        raise Mistake("NAME {}: expected a module's name of small letters, digits and _, such as {}".format(
            name, PLACEHOLDER))
    if name in kinds():
        raise Mistake("NAME {}: there is such a kind of simulator here already; name another".format(name))


def _is_a_module(name: str) -> bool:
    """Whether `import name` would find another; a folder of this name is none."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    return name in sys.modules or (spec is not None and spec.origin is not None)


def package(name: str) -> Dict[str, str]:
    """Path -> text of each file."""
    source = Path(template.__file__).read_text(encoding="utf-8")
    files = {"my_simulator.py": source, "pyproject.toml": PYPROJECT, "README.md": README,
             "tests/test_my_simulator.py": TESTS}
    return {path.replace(PLACEHOLDER, name): text.replace(PLACEHOLDER, name) for path, text in files.items()}
