"""Where the files of versions lie: a path of this host, or whatever fsspec opens. Importable without fsspec.

A folder of files is there whole or not at all: made under a hidden name and renamed, or, on an object store, with the
file that says it is whole as the last.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

from cosmos_actor.weight_plane.errors import WeightError

SETTING = "weights.directory"
LOCAL = "file://"
MAKING, GOING = "making", "going"
OWN = re.compile(rf"\..+-({MAKING}|{GOING})-[0-9a-f]{{8}}")
"""Hidden folders of a local directory that were made here. Whatever else is hidden there is somebody else's."""


class DirectoryUnusable(WeightError):
    """The directory can not be read or written; the text says why."""


class VersionMissing(WeightError):
    """No such version is in the directory, or not all of it."""


class Making(Protocol):
    """A folder that is not there yet."""

    def create(self, name: str) -> IO[bytes]: ...


class Files(Protocol):
    """What is needed of a file system. Paths are relative to it; what begins with a dot is hidden."""

    url: str

    def making(self, home: str, name: str) -> AbstractContextManager[Making]:
        """After the block the folder `home/name` is there; after an error in it, it is not."""
        ...

    def folders(self, home: str) -> list[str]: ...

    def has(self, path: str) -> bool: ...

    def open(self, path: str) -> IO[bytes]:
        """Raises FileNotFoundError."""
        ...

    def delete(self, home: str, name: str) -> None: ...


def files_at(url: str) -> Files:
    """Raises DirectoryUnusable for a URL that nobody here can open."""
    return RemoteFiles(url) if "://" in url and not url.startswith(LOCAL) else LocalFiles(url)


class LocalFiles:
    """A directory of this host, or one that it has mounted. A folder appears by a rename."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = Path(url.removeprefix(LOCAL))

    @contextmanager
    def making(self, home: str, name: str) -> Iterator[Making]:
        place = self._root / home
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob(".*"):
            if OWN.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)  # Of a writer that died.
        hidden = place / _hidden(name, MAKING)
        hidden.mkdir()
        try:
            yield _LocalMaking(hidden)
            if (place / name).exists():
                self.delete(home, name)
            os.rename(hidden, place / name)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def folders(self, home: str) -> list[str]:
        with suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self._root / home) if entry.is_dir() and entry.name[0] != "."]
        return []

    def has(self, path: str) -> bool:
        return (self._root / path).is_file()

    def open(self, path: str) -> IO[bytes]:
        return open(self._root / path, "rb")

    def delete(self, home: str, name: str) -> None:
        """At once for whoever lists; who has a file of it open goes on reading."""
        going = self._root / home / _hidden(name, GOING)
        os.rename(self._root / home / name, going)
        shutil.rmtree(going, ignore_errors=True)


def _hidden(name: str, what: str) -> str:
    return f".{name}-{what}-{secrets.token_hex(4)}"


class _LocalMaking:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, name: str) -> IO[bytes]:
        return open(self._folder / name, "xb")


class RemoteFiles:
    """Whatever fsspec opens: an object store, most often. A folder is whole once its last file is there."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError:
            raise DirectoryUnusable(f"{url} needs the package fsspec: pip install 'cosmos-actor[files]'",
                                    setting=SETTING) from None
        with Said(url, "nobody here can open it"):
            self._fs, self._root = url_to_fs(url)
            self._fs.use_listings_cache = False

    @contextmanager
    def making(self, home: str, name: str) -> Iterator[Making]:
        folder = self._at(f"{home}/{name}")
        self._fs.makedirs(folder, exist_ok=True)
        try:
            yield _RemoteMaking(self._fs, folder)
        except BaseException:
            with suppress(Exception):  # the error that is on its way says more
                self._fs.rm(folder, recursive=True)
            raise

    def folders(self, home: str) -> list[str]:
        try:
            found = self._fs.ls(self._at(home), detail=True, refresh=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

    def has(self, path: str) -> bool:
        return bool(self._fs.exists(self._at(path)))

    def open(self, path: str) -> IO[bytes]:
        return cast("IO[bytes]", self._fs.open(self._at(path), "rb"))

    def delete(self, home: str, name: str) -> None:
        self._fs.rm(self._at(f"{home}/{name}"), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")


class _RemoteMaking:
    def __init__(self, fs: Any, folder: str) -> None:
        self._fs, self._folder = fs, folder

    def create(self, name: str) -> IO[bytes]:
        return cast("IO[bytes]", self._fs.open(f"{self._folder}/{name}", "wb"))


class Said:
    """Whatever a file system raises in the block becomes one line with its URL: fsspec's raise what they like."""

    def __init__(self, url: str, what: str) -> None:
        self._url, self._what = url, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, WeightError):
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise DirectoryUnusable(f"{self._url}: {self._what}: {said[0]}", setting=SETTING) from error
