from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_actor.actors.errors import NotFound, RunDirectoryBusy, RunDirectoryMismatch, UserError
from cosmos_actor.actors.run_directory import RunDirectory, RunPaths

RESOLVED = """[rollout]
temperature = 1.0
top_k = 0

[run]
steps = 100
seed = 0
"""
OWNER = """
import sys, time
from cosmos_actor.actors.run_directory import RunDirectory
with RunDirectory.create(sys.argv[1], "digest", run_id="run-1"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def make(folder: Path, digest: str = "digest") -> RunDirectory:
    return RunDirectory.create(folder, digest, run_id="run-1", resolved=RESOLVED)


def one_line(caught: pytest.ExceptionInfo[UserError]) -> str:
    text = str(caught.value)
    assert "\n" not in text and "run.run_dir" in text
    return text


def test_a_new_directory_has_its_parts_and_keys_are_private(folder: Path) -> None:
    with make(folder) as directory:
        assert directory.run_id == "run-1"
        assert directory.configuration.read_text() == RESOLVED
        assert stat.S_IMODE(directory.keys.stat().st_mode) == 0o700
        assert directory.describe()["configuration_digest"] == "digest"
        assert directory.log("rollout-0", "1-abc") == folder / "logs" / "rollout-0" / "1-abc.log"


def test_an_empty_folder_is_taken_and_one_with_other_things_is_refused_untouched(folder: Path) -> None:
    folder.mkdir(parents=True)
    make(folder).close()
    other = folder.parent / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("dear")
    with pytest.raises(RunDirectoryMismatch) as caught:
        make(other)
    assert "not a run directory and not empty (it has thesis.tex)" in one_line(caught)
    assert [entry.name for entry in other.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("left", [".run.json.4711", ".config.resolved.toml.4711"])
def test_what_a_killed_writer_left_half_written_is_no_reason_to_refuse(folder: Path, left: str) -> None:
    make(folder).close()
    (folder / "run.json").unlink()
    (folder / left).write_text("{")
    with make(folder) as directory:
        assert directory.run_id == "run-1"


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryMismatch, match="is a file"):
        make(tmp_path / "file")


@pytest.mark.parametrize("name", ["/dev/null", "/dev/null/run", "/proc/1/run", "x" * 300, "a\0b"])
def test_what_the_file_system_refuses_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        make(tmp_path / name)
    assert "setting `run.run_dir`" in one_line(caught) and len(one_line(caught)) < 300 + len(str(tmp_path))
    assert RunPaths(tmp_path / "absent").owner_pid() is None


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_a_damaged_run_json_is_one_line(folder: Path, text: str) -> None:
    make(folder).close()
    RunPaths(folder).identity.write_text(text)
    with pytest.raises(NotFound, match="run.json can not be read"):
        RunDirectory.open_for_resume(folder, "d")


def test_what_a_killed_creation_left_is_taken(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "lock").write_text("")
    (folder / "logs").mkdir()
    (folder / "keys").mkdir(mode=0o700)
    with make(folder) as directory:
        assert directory.run_id == "run-1"


def test_a_finished_run_is_not_started_over_but_can_be_gone_on_with(folder: Path) -> None:
    make(folder).close()
    with pytest.raises(RunDirectoryMismatch) as caught:
        make(folder)
    assert "holds a run already; go on with it by --resume" in one_line(caught)
    with RunDirectory.open_for_resume(folder, "digest", resolved=RESOLVED.replace("100", "200")) as again:
        assert again.run_id == "run-1"
        assert "steps = 200" in again.configuration.read_text()


def test_another_configuration_is_refused_with_the_settings_that_differ(folder: Path) -> None:
    make(folder).close()
    changed = RESOLVED.replace("1.0", "0.7").replace("seed = 0", "seed = 1").replace("steps = 100", "steps = 50")
    with pytest.raises(RunDirectoryMismatch) as caught:
        RunDirectory.open_for_resume(folder, "other", resolved=changed + "[sft]\nsteps = 3\n", resumable=["run.steps"])
    assert "another configuration; these differ: rollout.temperature, run.seed, sft.steps;" in one_line(caught)
    with pytest.raises(RunDirectoryMismatch, match=r"toml and run.json do not belong together.*put it back"):
        make(folder, "other")
    assert RunPaths(folder).configuration.read_text() == RESOLVED, "a refusal changes nothing"
    RunDirectory.open_for_resume(folder, "digest").close()


def test_resuming_what_is_no_run_is_refused(folder: Path) -> None:
    with pytest.raises(NotFound) as caught:
        RunDirectory.open_for_resume(folder, "digest")
    assert "is not a run directory" in one_line(caught)
    assert not folder.exists()


def test_a_directory_in_use_names_the_process_and_kill_9_of_it_frees_the_directory(
        folder: Path, popen: Callable[..., subprocess.Popen[str]]) -> None:
    owner = popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    assert RunPaths(folder).owner_pid() == owner.pid
    for take in (make, lambda path: RunDirectory.open_for_resume(path, "another")):
        with pytest.raises(RunDirectoryBusy) as caught:
            take(folder)
        assert f"in use by process {owner.pid};" in one_line(caught)
    owner.kill()
    owner.wait(5)
    assert RunPaths(folder).owner_pid() is None
    RunDirectory.open_for_resume(folder, "digest").close()


def test_a_child_does_not_hold_the_directory(folder: Path, popen: Callable[..., subprocess.Popen[str]]) -> None:
    with make(folder):
        sleeper = popen(["sleep", "600"], close_fds=False)
    with RunDirectory.open_for_resume(folder, "digest") as again:
        assert again.owner_pid() == os.getpid() and sleeper.poll() is None


def test_logs_of_an_actor_come_oldest_first(folder: Path) -> None:
    with make(folder) as directory:
        for name in ("9-b", "10-a"):
            directory.log("rollout-0", name).parent.mkdir(exist_ok=True)
            directory.log("rollout-0", name).write_text(name)
        assert [path.stem for path in directory.logs_of("rollout-0")] == ["9-b", "10-a"]
        assert directory.logs_of("reward-0") == []


def test_events_go_on_after_a_resume(folder: Path) -> None:
    with make(folder) as directory:
        directory.writer(directory.events).append({"event": "started"})
        assert directory.writer(directory.events) is directory.writer(directory.events)
        assert directory.statistics() == {"events.jsonl": {"lines_appended": 1, "repaired_bytes": 0}}
    with open(RunPaths(folder).events, "a") as file:
        file.write('{"eve')
    with RunDirectory.open_for_resume(folder, "digest") as directory:
        assert directory.writer(directory.events).repaired_bytes == 5


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"abc", b"12", b"a:b:c", b"x" * 10_000])
def test_damaged_words_in_the_lock_are_nobodys_name(folder: Path, damage: bytes) -> None:
    make(folder).close()
    (folder / "lock").write_bytes(damage)
    assert RunPaths(folder).owner_pid() is None
    RunDirectory.open_for_resume(folder, "digest").close()


@pytest.mark.parametrize("text", ["{}", "[]", '{"configuration_digest": "digest"}'])
def test_a_run_json_that_lacks_something_is_one_line(folder: Path, text: str) -> None:
    make(folder).close()
    (folder / "run.json").write_text(text)
    with pytest.raises(NotFound) as caught:
        RunDirectory.open_for_resume(folder, "digest")
    assert "run.json can not be read" in one_line(caught) and "start a new run" in one_line(caught)


def test_a_disk_that_refuses_when_it_is_closed_frees_it_all_the_same(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(folder)

    def refuse(fd: int, length: int) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse)
        directory.close()
    RunDirectory.open_for_resume(folder, "digest").close()
