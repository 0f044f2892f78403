"""Versions as files: whole or not there, verified by whoever takes them, readable by the tools of others."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace

import numpy as np
import pytest

from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.weight_plane.digest import weights_digest
from cosmos_actor.weight_plane.errors import ForeignRun, VersionNotNewer, WeightError, WeightsCorrupt
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.transports import directory_source, safetensors_file
from cosmos_actor.weight_plane.transports.directory import MANIFEST, VersionDirectory, from_directory
from cosmos_actor.weight_plane.transports.directory_source import DirectorySource, written_too
from cosmos_actor.weight_plane.transports.file_systems import DirectoryUnusable, VersionMissing
from cosmos_actor.weight_plane.transports.safetensors_file import FileDamaged
from cosmos_actor.weight_plane.version import Version
from tests.waiting import eventually
from tests.weight_plane.memory_bulk import MemoryBulk
from tests.weight_plane.models import large_model

MODEL = large_model(1)


def version(step: int, epoch: int = 0) -> Version:
    return Version("run", epoch, step)


@pytest.fixture(params=["path", "file", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        pytest.importorskip("fsspec")
        yield f"memory://{uuid.uuid4().hex}"
    else:
        yield f"file://{tmp_path}/versions" if request.param == "file" else str(tmp_path / "versions")


def same(found, expected) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == expected[name].dtype and np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("file_bytes", [1 << 20, 1 << 30])
def test_a_version_is_read_as_it_was_written(url, file_bytes):
    directory = VersionDirectory(url, "run", file_bytes=file_bytes)
    digest = directory.write(version(3), MODEL)
    taken = directory.read()
    assert taken.version == version(3) and taken.digest == digest == weights_digest(MODEL)
    assert same(taken.tensors, MODEL) and all(tensor.flags.writeable for tensor in taken.tensors.values())


def test_the_newest_are_kept_and_a_step_after_a_rewind_is_newer(url):
    directory = VersionDirectory(url, "run", keep=2)
    for one in (version(8), version(9), version(7, epoch=1)):
        directory.write(one, MODEL)
    assert directory.versions() == [version(9), version(7, epoch=1)]
    assert directory.read().version == version(7, epoch=1)
    with pytest.raises(VersionMissing, match=r"version 0\.8 is not in"):
        directory.read(version(8))


def test_another_job_takes_it_without_a_bus(url):
    for run, step in (("one", 5), ("one", 6), ("two", 1)):
        VersionDirectory(url, run).write(Version(run, 0, step), large_model(step))
    assert same(from_directory(url, "one").tensors, large_model(6))
    assert same(from_directory(url, "one", step=5).tensors, large_model(5))
    with pytest.raises(VersionMissing, match=r"2 runs \((one, two|two, one)\): name one"):
        from_directory(url)
    with pytest.raises(VersionMissing, match="no version of step 9"):
        from_directory(url, "one", step=9)


def test_what_is_not_there_is_one_line(url):
    with pytest.raises(VersionMissing, match="no version of run run"):
        VersionDirectory(url, "run").read()
    with pytest.raises(VersionMissing, match="0 runs"):
        from_directory(url)


def test_safetensors_opens_the_files_and_finds_the_names(tmp_path):
    safetensors, torch = pytest.importorskip("safetensors"), pytest.importorskip("torch")
    VersionDirectory(str(tmp_path), "run").write(version(3), MODEL)
    with safetensors.safe_open(tmp_path / "run" / "0.3" / "model.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(MODEL)
        assert opened.metadata()["version"] == "0.3"
        norm = opened.get_tensor("layers.3.norm")
        assert norm.dtype == torch.bfloat16
        assert np.array_equal(norm.view(torch.uint16).numpy(), MODEL["layers.3.norm"])
        assert np.array_equal(opened.get_tensor("embed").numpy(), MODEL["embed"])


def test_transformers_loads_a_version_in_several_files(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.Qwen3Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                                      num_key_value_heads=1, head_dim=16, vocab_size=64)
    model = transformers.Qwen3ForCausalLM(config)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    VersionDirectory(str(tmp_path), "run", file_bytes=20_000).write(version(1), tensors)
    folder = tmp_path / "run" / "0.1"
    config.save_pretrained(folder)
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    assert all(torch.equal(one, loaded.state_dict()[name]) for name, one in model.state_dict().items())


def test_what_the_library_wrote_is_read():
    numpy_files = pytest.importorskip("safetensors.numpy")
    data = numpy_files.save({"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.ones(3)})
    found = safetensors_file.read(io.BytesIO(data), "x")
    assert np.array_equal(found["a"][1], np.arange(6).reshape(2, 3)) and found["b"][0] == "float64"


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    directory = VersionDirectory(str(tmp_path), "run", file_bytes=1 << 20)
    directory.write(version(1), MODEL)
    return directory, tmp_path / "run" / "0.1"


def an_end(folder):
    return sorted(folder.glob("*.safetensors"))[-1]


def cut(path, left):
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)


@pytest.mark.parametrize(("damage", "error", "line"), [
    (lambda folder: cut(an_end(folder), -1), FileDamaged, "is cut off: tensor"),
    (lambda folder: cut(an_end(folder), 100), FileDamaged, "damaged or cut off"),
    (lambda folder: cut(an_end(folder), 0), FileDamaged, "damaged or cut off"),
    (lambda folder: an_end(folder).unlink(), VersionMissing, "is not in"),
    (lambda folder: (folder / MANIFEST).unlink(), VersionMissing, "no run/0.1/manifest.json"),
    (lambda folder: cut(folder / MANIFEST, -10), FileDamaged, "manifest.json is damaged"),
    (lambda folder: (folder / MANIFEST).write_text("[]"), FileDamaged, "manifest.json is damaged"),
    (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), FileDamaged, "manifest.json is damaged"),
    (lambda folder: an_end(folder).open("ab").write(b"x"), FileDamaged, "goes on after its last tensor"),
], ids=str)
def test_a_damaged_version_is_one_line_that_names_the_file(written, damage, error, line):
    directory, folder = written
    damage(folder)
    with pytest.raises(error, match=line) as caught:
        directory.read(version(1))
    assert "\n" not in str(caught.value) and str(folder.parent.parent) in str(caught.value)


def test_one_flipped_byte_names_its_tensor(written):
    directory, folder = written
    with an_end(folder).open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsCorrupt, match="tensor .*: its bytes in"):
        directory.read(version(1))


def test_a_manifest_that_was_changed_together_with_the_bytes_is_still_not_what_was_announced(written):
    directory, _ = written
    directory.write(version(1), large_model(2))
    directory.read(version(1), weights_digest(large_model(2)))
    with pytest.raises(FileDamaged, match="announced were"):
        directory.read(version(1), weights_digest(MODEL))


def test_every_cut_of_a_file_is_a_typed_line():
    buffer = io.BytesIO()
    safetensors_file.write(buffer, {"a": np.arange(10.0), "b": np.zeros((0, 2), np.int8)}, {"k": "v"})
    whole = buffer.getvalue()
    assert set(safetensors_file.read(io.BytesIO(whole), "x")) == {"a", "b"}
    for left in range(len(whole)):
        with pytest.raises(FileDamaged):
            safetensors_file.read(io.BytesIO(whole[:left]), "x")


@pytest.mark.parametrize("table", [
    {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, {"a": {"dtype": "F99", "shape": [1],
     "data_offsets": [0, 4]}}, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, {"a": 3}, [],
    {"a": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 64]}}, {"a": {"dtype": "F32", "shape": ["1"],
     "data_offsets": [0, 4]}}, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
])
def test_a_table_that_contradicts_itself_is_refused_before_memory_is_taken(table):
    head = json.dumps(table).encode()
    with pytest.raises(FileDamaged):
        safetensors_file.read(io.BytesIO(len(head).to_bytes(8, "little") + head + b"\0" * 8), "x")


def test_a_dtype_that_the_format_does_not_have_is_named_and_nothing_is_left(tmp_path):
    directory = VersionDirectory(str(tmp_path), "run")
    with pytest.raises(WeightError, match="tensor odd is complex64"):
        directory.write(version(1), {"odd": np.zeros(2, np.complex64)})
    assert not directory.versions() and not list((tmp_path / "run").iterdir())


WRITER = """
import sys
from tests.weight_plane.transports.test_directory import MODEL, VersionDirectory, version
from cosmos_actor.weight_plane.transports import safetensors_file
directory = VersionDirectory(sys.argv[1], "run", file_bytes=1 << 20)
directory.write(version(1), MODEL)
before, count = safetensors_file.write, [0]
def slowly(*arguments):
    count[0] += 1
    if count[0] == 3:
        print("half", flush=True)
        sys.stdin.readline()
    return before(*arguments)
safetensors_file.write = slowly
directory.write(version(2), MODEL)
"""


def test_a_writer_that_is_killed_half_way_leaves_the_older_version_and_the_next_one_cleans_up(popen, tmp_path):
    writer = popen([sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"half\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait(5)
    directory = VersionDirectory(str(tmp_path), "run")
    assert directory.versions() == [version(1)] and same(directory.read().tensors, MODEL)
    assert len(list((tmp_path / "run").iterdir())) == 2
    directory.write(version(3), MODEL)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["0.1", "0.3"]


def test_what_is_hidden_beside_the_versions_and_not_of_a_writer_stays(tmp_path):
    run = tmp_path / "run"
    for name in (".git", ".0.1", ".snapshot-deadbeef", ".0.1-making-1234567", ".0.2-going-0123abcd",
                 ".0.2-making-0123abcd"):
        (run / name).mkdir(parents=True)
        (run / name / "file").write_text("")
    (run / ".nfs0001").write_text("")
    directory = VersionDirectory(str(tmp_path), "run", keep=1)
    for step in (1, 2):
        directory.write(version(step), MODEL)
    assert sorted(path.name for path in run.iterdir()) == [
        ".0.1", ".0.1-making-1234567", ".git", ".nfs0001", ".snapshot-deadbeef", "0.2"]
    assert (run / ".git" / "file").exists() and directory.versions() == [version(2)]


def test_a_place_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusable, match="version 0.1 could not be written: .*`weights.directory`"):
        VersionDirectory(str(tmp_path / "file"), "run").write(version(1), MODEL)


def test_a_url_that_nobody_can_open_is_named():
    pytest.importorskip("fsspec")
    with pytest.raises(DirectoryUnusable, match="nosuch://x: nobody here can open it"):
        VersionDirectory("nosuch://x", "run")


# -- inside a job ---------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path):
    directory = VersionDirectory(str(tmp_path), "run")
    publish = written_too(WeightPublisher(MemoryBulk()).publish, str(tmp_path), "run", keep=2)
    said = []
    return publish, DirectorySource(directory, "run", said.append), tmp_path, said


def pull(source, manifest, deadline_s=5.0):
    return asyncio.run(source.pull(manifest, deadline_s))


def test_announced_versions_are_taken_and_the_way_is_said_once(job):
    publish, source, folder, said = job
    for step in (1, 2):
        manifest = publish(version(step), large_model(step))
        assert same(pull(source, manifest), large_model(step)) and source.newest == version(step)
    assert said == [f"weights come by directory: weights.transport asks for it ({folder})"]
    assert source.statistics()["pulled"] == 2


def test_versions_only_grow_and_are_of_this_run(job):
    publish, source, *_ = job
    manifest = publish(version(1), MODEL)
    pull(source, manifest)
    with pytest.raises(VersionNotNewer):
        pull(source, manifest)
    with pytest.raises(ForeignRun):
        pull(source, replace(manifest, version=Version("other", 0, 2)))


def test_a_damaged_version_is_not_taken_and_the_next_is(job):
    publish, source, folder, _ = job
    pull(source, publish(version(1), MODEL))
    damaged = publish(version(2), MODEL)
    cut(folder / "run" / "0.2" / "model.safetensors", -5)
    with pytest.raises(FileDamaged):
        pull(source, damaged)
    assert source.newest == version(1)
    pull(source, publish(version(3), MODEL))


def test_one_that_appears_late_is_waited_for_and_one_that_never_does_is_missing(job, monkeypatch):
    publish, source, folder, _ = job
    manifest = publish(version(1), MODEL)
    os.rename(folder / "run" / "0.1", folder / "later")

    async def late():
        task = asyncio.ensure_future(source.pull(manifest, 20.0))
        await asyncio.sleep(0.05)
        os.rename(folder / "later", folder / "run" / "0.1")
        return await task

    assert same(asyncio.run(late()), MODEL)
    monkeypatch.setattr(directory_source, "APPEARS_WITHIN_S", 0.0)
    with pytest.raises(VersionMissing):
        pull(source, replace(manifest, version=version(2)))


def test_a_file_system_that_hangs_costs_the_deadline_and_no_more(job):
    publish, source, folder, _ = job
    manifest = publish(version(1), MODEL)
    path = folder / "run" / "0.1" / MANIFEST
    path.unlink()
    os.mkfifo(path)  # opening it waits until somebody writes
    with pytest.raises(DeadlineExceeded, match="was not read out of"):
        pull(source, manifest, 0.3)
    with open(path, "w"):
        pass
    eventually(lambda: True, "the end of the thread")
