"""`cosmos-actor sim wheel`: what a simulator's host needs of this package, as one small file to copy there."""

from __future__ import annotations

import hashlib
import io
import re
import stat
import tempfile
import zipfile
from base64 import urlsafe_b64encode
from email.parser import HeaderParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple

import cosmos_actor

from .mistakes import Mistake

PROJECT = "cosmos-actor"
LOCAL = "sim"
"""What its version has after the `+`: `pip list` tells it from the whole package, and whoever asks for 0.1.0 has it."""
PARTS = ("bus", "simulator_bridge")
"""Whole: plugins and pictures are loaded by name, which no look at imports would find."""
DOOR = ("cli/__init__.py", "cli/__main__.py")
"""Of the command line: the entry point, which hands `attach` and `sim` on before it needs the rest."""
EXTRAS = ("sim", "record")
OF_AN_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
LEFT_OUT = ("Description", "Description-Content-Type", "Dynamic")
"""The README: most of what it tells of is not in here."""
LICENCES = ("licenses/", "", "../")
"""Where a licence lies, from the metadata: since setuptools 77, before it, and in a checkout."""
OLDEST = (1980, 1, 1, 0, 0, 0)
"""The first time that a zip file can tell. Another one would make other bytes of the same files."""


class Built(NamedTuple):
    name: str
    """The file's: pip reads project, version and tags in it."""
    content: bytes
    files: int


def write(folder: Path) -> Tuple[Path, Built]:
    """Write the wheel into `folder`, made where it is missing, whole or not at all, over one of the same name.
    Raises Mistake."""
    made = built()
    target = folder / made.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".cosmos-actor-", dir=str(folder)) as unfinished:
            (Path(unfinished) / made.name).write_bytes(made.content)
            (Path(unfinished) / made.name).replace(target)
    except OSError as error:
        raise Mistake("can not write into {}: {} (--out)".format(folder, error.strerror or error)) from error
    return target, made


def built() -> Built:
    """The wheel of what is installed here: the same files and zlib give the same bytes. Raises Mistake."""
    found = _installed()
    version = "{}+{}".format(_public(found.version), LOCAL)
    stem = "{}-{}".format(PROJECT.replace("-", "_"), version)
    files = dict(sorted({**_modules(), **_metadata(found, version, stem + ".dist-info/")}.items()))
    files[stem + ".dist-info/RECORD"] = _record(files, stem + ".dist-info/RECORD")
    return Built(stem + "-py3-none-any.whl", _zipped(files), len(files))


def _installed() -> Distribution:
    try:
        found = distribution(PROJECT)
    except PackageNotFoundError:
        raise Mistake("{} is imported from {} and not installed, so that nothing tells what it requires: "
                      "pip install it, then try again".format(PROJECT, _package())) from None
    if _public(found.version) != cosmos_actor.__version__:
        raise Mistake("{} {} is installed, but its modules in {} are {}: pip install it again".format(
            PROJECT, found.version, _package(), cosmos_actor.__version__))
    return found


def _public(version: str) -> str:
    """Without a local part: the small wheel makes itself again."""
    return version.partition("+")[0]


def _package() -> Path:
    return Path(cosmos_actor.__file__).parent


def _modules() -> Dict[str, bytes]:
    """Path in the wheel -> bytes: the parts, the door, and the modules that all parts share, beside them."""
    top = _package()
    paths = [*top.glob("*.py"), top / "py.typed", *(top / name for name in DOOR)]
    paths += [path for part in PARTS for path in (top / part).rglob("*.py")]
    return {"cosmos_actor/" + path.relative_to(top).as_posix(): path.read_bytes() for path in paths}


def _metadata(found: Distribution, version: str, folder: str) -> Dict[str, bytes]:
    """`folder`'s files but RECORD, from what is installed: nothing is said twice that could come to differ."""
    headers = HeaderParser().parsestr(found.read_text("METADATA") or found.read_text("PKG-INFO") or "").items()
    files = {
        "METADATA": "".join("{}: {}\n".format(*header) for header in _headers(headers, version)),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: {} {}\nRoot-Is-Purelib: true\nTag: py3-none-any\n".format(
            PROJECT, cosmos_actor.__version__),
        "entry_points.txt": found.read_text("entry_points.txt") or "",
    }
    files.update(("licenses/" + name, _licence(found, name)) for key, name in headers if key == "License-File")
    return {folder + name: text.encode("utf-8") for name, text in files.items()}


def _headers(headers: List[Tuple[str, str]], version: str) -> Iterator[Tuple[str, str]]:
    """Those of the small wheel: its version, and of the extras only EXTRAS."""
    for key, value in headers:
        extra = OF_AN_EXTRA.search(value) if key == "Requires-Dist" else None
        of = value if key == "Provides-Extra" else extra.group(1) if extra else None
        if key not in LEFT_OUT and (of is None or of in EXTRAS):
            yield key, version if key == "Version" else value


def _licence(found: Distribution, name: str) -> str:
    for place in LICENCES:
        text = found.read_text(place + name)
        if text is not None:
            return text
    raise Mistake("{} is installed without its {}: pip install it again".format(PROJECT, name))


def _record(files: Dict[str, bytes], itself: str) -> bytes:
    lines = ["{},sha256={},{}\n".format(name, _digest(content), len(content)) for name, content in files.items()]
    return "".join([*lines, itself + ",,\n"]).encode("utf-8")


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")


def _zipped(files: Dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, OLDEST)
            entry.create_system = 3  # Unix, on which the mode is read
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)
    return buffer.getvalue()
