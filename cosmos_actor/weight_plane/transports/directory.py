"""Versions as files: a publisher writes each whole, and whoever sees the directory takes it, now or later.

    <directory>/<run>/0.12/model-00001-of-00002.safetensors ...   named tensors, as Hugging Face names and splits them
                           model.safetensors.index.json           the table that transformers looks for
                           manifest.json                          digests of every tensor; written last
    <directory>/<run>/.0.13-making-1f2e.../                       being written, or left by a writer that died

A version is there when its manifest is: it is written under another name and renamed. On an object store, which has no
rename, the manifest is the last object of it. Readers verify every tensor, against
the manifest beside it or the one that came over the bus: that finds accidents, and whoever may write there is trusted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import IO, Any, NamedTuple, cast

import numpy as np

from cosmos_actor.weight_plane.digest import combined_digest, digest_of, raw, tensor_digests
from cosmos_actor.weight_plane.errors import WeightsCorrupt
from cosmos_actor.weight_plane.transports import safetensors_file
from cosmos_actor.weight_plane.transports.file_systems import (
    SETTING,
    DirectoryUnusable,
    Said,
    VersionMissing,
    files_at,
)
from cosmos_actor.weight_plane.transports.safetensors_file import FileDamaged
from cosmos_actor.weight_plane.version import Version

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
"""Of one file of a version at most, unless one tensor is larger; what Hugging Face's own tools split at is 5 GB."""
MANIFEST, INDEX = "manifest.json", "model.safetensors.index.json"
FORMAT = 1


class Taken(NamedTuple):
    """A version that was read and verified."""

    version: Version
    digest: str
    tensors: dict[str, np.ndarray]
    """bfloat16 as uint16."""


class VersionDirectory:
    """The last `keep` versions of one run, each whole; a reader never sees a part of one. One writer at a time."""

    def __init__(self, url: str, run_id: str, *, keep: int = 2, file_bytes: int = FILE_BYTES) -> None:
        """`url`: a path, file:///path, or any URL that fsspec knows. Raises DirectoryUnusable for one it does not."""
        self.url = url
        self._files = files_at(url)
        self._run_id, self._keep, self._file_bytes = run_id, keep, file_bytes

    def write(self, version: Version, tensors: Mapping[str, np.ndarray]) -> str:
        """Write a version, then delete what is older than the kept ones; returns its digest.

        Raises DirectoryUnusable, and WeightError for a dtype that the format does not have; then it is not there.
        """
        home, name = self._run_id, str(version)
        digests = tensor_digests(tensors)
        digest = combined_digest(digests)
        parts = _parts(tensors, self._file_bytes)
        label = {"format": "pt", "run_id": version.run_id, "version": name, "digest": digest}
        with self._said(f"version {name} could not be written"), self._files.making(home, name) as made:
            for file, part in parts.items():
                with made.create(file) as opened:
                    safetensors_file.write(opened, part, label)
            with made.create(INDEX) as opened:
                opened.write(_json({"metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
                                    "weight_map": {name: file for file, part in parts.items() for name in part}}))
            with made.create(MANIFEST) as opened:
                opened.write(_json(_manifest(version, digest, digests, parts)))
        self._delete_older()
        return digest

    def versions(self) -> list[Version]:
        """What is there, whole, oldest first."""
        with self._said("its versions could not be listed"):
            found = [_version(self._run_id, name) for name in self._files.folders(self._run_id)]
            there = [one for one in found if one is not None and self._files.has(f"{self._run_id}/{one}/{MANIFEST}")]
        return sorted(there, key=lambda one: one.ordinal)

    def read(self, version: Version | None = None, expected: str | None = None) -> Taken:
        """One version (None: the newest), every tensor verified; `expected` is the digest that it must have.

        Raises VersionMissing, FileDamaged or WeightsCorrupt, each one line that names the file or the tensor.
        """
        if version is None:
            there = self.versions()
            if not there:
                raise VersionMissing(f"no version of run {self._run_id} is in {self.url}", setting=SETTING)
            version = there[-1]
        where = f"{self._run_id}/{version}"
        table = self._read_manifest(where, version, expected)
        tensors: dict[str, np.ndarray] = {}
        for file in sorted({entry["file"] for entry in table["tensors"].values()}):
            entries = {name: entry for name, entry in table["tensors"].items() if entry["file"] == file}
            tensors.update(self._read_file(f"{where}/{file}", entries))
        return Taken(version, table["digest"], {name: tensors[name] for name in table["tensors"]})

    def _read_manifest(self, where: str, version: Version, expected: str | None) -> dict[str, Any]:
        path = f"{where}/{MANIFEST}"
        with self._open(path, f"version {version}") as opened:
            data = opened.read()
        try:
            table = json.loads(data)
            digests = {name: bytes.fromhex(entry["digest"]) for name, entry in table["tensors"].items()}
            whole = table["format"] == FORMAT and table["digest"] == combined_digest(digests)
            whole = whole and (table["run_id"], table["version"]) == (version.run_id, str(version))
            whole = whole and all("/" not in entry["file"] for entry in table["tensors"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        if not whole:
            raise FileDamaged(f"{self.url}/{path} is damaged, or of another version", setting=SETTING)
        if expected is not None and table["digest"] != expected:
            raise FileDamaged(f"{self.url}/{path} is of weights {table['digest'][:16]}, announced were"
                              f" {expected[:16]}", setting=SETTING)
        return cast("dict[str, Any]", table)

    def _read_file(self, path: str, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
        where = f"{self.url}/{path}"
        with self._open(path, where) as opened:
            found = safetensors_file.read(opened, where)
        if set(found) != set(entries):
            odd = sorted(set(found) ^ set(entries))
            raise FileDamaged(f"{where} and the manifest differ in tensors: {', '.join(odd[:10])}", setting=SETTING)
        for name, (dtype, array) in found.items():
            if digest_of(dtype, array.shape, raw(array)).hex() != entries[name]["digest"]:
                raise WeightsCorrupt(name, f"its bytes in {where} are not those of the manifest", setting=SETTING)
        return {name: array for name, (_, array) in found.items()}

    def _open(self, path: str, what: str) -> IO[bytes]:
        with self._said(f"{path} could not be read"):
            try:
                return self._files.open(path)
            except FileNotFoundError:
                raise VersionMissing(f"{what} is not in {self.url}: there is no {path}", setting=SETTING) from None

    def _delete_older(self) -> None:
        """What can not be deleted is left: the version that was written is there all the same."""
        try:
            for version in self.versions()[: -self._keep]:
                self._files.delete(self._run_id, str(version))
        except (DirectoryUnusable, OSError) as error:
            log.warning("an old version in %s could not be deleted: %s", self.url, error)

    def _said(self, what: str) -> Said:
        return Said(self.url, what)


def from_directory(url: str, run_id: str | None = None, step: int | None = None) -> Taken:
    """A version out of a directory, verified, for another job or none: the newest, or the newest of `step`.

    `run_id` may be left out where the directory has one run. Raises what `VersionDirectory.read` raises.
    """
    if run_id is None:
        with Said(url, "its runs could not be listed"):
            runs = files_at(url).folders("")
        if len(runs) != 1:
            raise VersionMissing(f"{url} has {len(runs)} runs ({', '.join(runs[:10])}): name one", setting=SETTING)
        run_id = runs[0]
    directory = VersionDirectory(url, run_id)
    if step is None:
        return directory.read()
    found = [version for version in directory.versions() if version.step == step]
    if not found:
        raise VersionMissing(f"no version of step {step} of run {run_id} is in {url}", setting=SETTING)
    return directory.read(found[-1])


def _parts(tensors: Mapping[str, np.ndarray], file_bytes: int) -> dict[str, dict[str, np.ndarray]]:
    """File name -> its tensors, in their order, at most `file_bytes` in a file."""
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors.items():
        if parts[-1] and size + array.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, start=1)}


def _manifest(version: Version, digest: str, digests: Mapping[str, bytes],
              parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    entries = {name: {"file": file, "digest": digests[name].hex()} for file, part in parts.items() for name in part}
    return {"format": FORMAT, "run_id": version.run_id, "version": str(version), "digest": digest,
            "tensors": {name: entries[name] for name in digests}}


def _json(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, indent=1).encode() + b"\n"


def _version(run_id: str, name: str) -> Version | None:
    epoch, _, step = name.partition(".")
    return Version(run_id, int(epoch), int(step)) if epoch.isdecimal() and step.isdecimal() else None
