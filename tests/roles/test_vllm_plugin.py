"""What of vLLM's plug-in needs no vLLM: how parts are taken, how all workers get a version, who dies with whom.

The workers here take through the real taker and the real shared memory, and load nothing; vLLM's own are in
tests/project/test_vllm_plugin.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cosmos_actor.bus.bulk.settings import BulkSettings
from cosmos_actor.bus.bulk.store import BulkStore
from cosmos_actor.bus.errors import BulkGone
from cosmos_actor.bus.identity import Identity
from cosmos_actor.bus.keys import KeyRing, make_run_keys
from cosmos_actor.roles.engine import WeightsLost, WeightsRefused
from cosmos_actor.roles.vllm_plugin import loader as loading
from cosmos_actor.roles.vllm_plugin.lives import LOST_A_WORKER
from cosmos_actor.roles.vllm_plugin.taking import Taker, manifest_of, manifest_text
from cosmos_actor.weight_plane.digest import tensor_digest, weights_digest
from cosmos_actor.weight_plane.errors import ForeignRun, ManifestInvalid, VersionNotNewer, WeightsCorrupt
from cosmos_actor.weight_plane.manifest import Manifest
from cosmos_actor.weight_plane.publisher import WeightPublisher
from cosmos_actor.weight_plane.reshard import Box, index
from cosmos_actor.weight_plane.version import Version
from tests.bulk.tools import elsewhere, served
from tests.waiting import eventually

WEIGHTS = {"rows": np.arange(24, dtype=np.float32).reshape(6, 4), "half": np.arange(8, dtype=np.uint16).reshape(2, 4),
           "norm": np.ones(3, np.float32)}
TENSORS = {name: torch.from_numpy(array).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)
           for name, array in WEIGHTS.items()}
SHAPES = {name: array.shape for name, array in WEIGHTS.items()}
PARTS: list[dict[str, Box]] = [{"rows": ((0, 3), (0, 4)), "half": ((0, 2), (0, 2)), "norm": ((0, 3),)},
                               {"rows": ((3, 6), (0, 4)), "half": ((0, 2), (2, 4)), "norm": ((0, 3),)}]


@pytest.fixture
def store() -> Iterator[BulkStore]:
    made = BulkStore(Identity("run", "policy", "policy-0", "0" * 32), BulkSettings(budget_bytes=1 << 20))
    yield made
    made.close()


def published(store: BulkStore, step: int = 1, run: str = "run") -> Manifest:
    return WeightPublisher(store).publish(Version(run, 0, step), WEIGHTS)


def flip(store: BulkStore, manifest: Manifest, name: str) -> None:
    [entry] = [entry for entry in manifest.tensors if entry.name == name]
    ref = manifest.buckets[entry.bucket]
    store._arena.block(ref.offset, ref.nbytes)[entry.offset] ^= 1


def test_a_worker_keeps_its_part_of_each_tensor_in_its_own_memory(store: BulkStore) -> None:
    manifest = manifest_of(manifest_text(published(store)))
    taken = Taker("run").take(manifest, PARTS[1], 5.0)
    store.close()
    for name, box in PARTS[1].items():
        assert np.array_equal(taken[name], WEIGHTS[name][index(box)]) and taken[name].flags.owndata
        assert taken[name].nbytes <= WEIGHTS[name].nbytes


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_a_changed_byte_is_refused_also_outside_of_the_part(store: BulkStore, name: str) -> None:
    manifest = published(store)
    flip(store, manifest, name)
    with pytest.raises(WeightsCorrupt, match=f"tensor {name}"):
        Taker("run").take(manifest, PARTS[1], 5.0)


def test_a_publisher_of_another_host_is_asked_with_the_keys_that_were_named(store: BulkStore, tmp_path: Path) -> None:
    files = make_run_keys(tmp_path, "run", ["policy", "rollout"])
    with served(store, KeyRing.load(files["policy"])):
        manifest = published(store)
        manifest = replace(manifest, buckets=[elsewhere(ref) for ref in manifest.buckets])
        with pytest.raises(BulkGone, match="its own host only"):
            Taker("run").take(manifest, PARTS[1], 5.0)
        taker = Taker("run", str(files["rollout"]))
        taken = taker.take(manifest, PARTS[1], 10.0)
        taker.close()
    assert all(np.array_equal(taken[name], WEIGHTS[name][index(box)]) for name, box in PARTS[1].items())


def test_what_is_not_to_be_taken_is_named(store: BulkStore) -> None:
    taker, manifest = Taker("run"), published(store, step=3)
    taker.check(manifest, Version("run", 0, 2))
    with pytest.raises(VersionNotNewer, match="this worker"):
        taker.check(manifest, Version("run", 0, 3))
    with pytest.raises(ForeignRun, match="another"):
        taker.check(published(store, run="another"), None)
    for text in ("", "?", "AAAA", manifest_text(manifest)[:-8]):
        with pytest.raises(ManifestInvalid, match="no manifest"):
            manifest_of(text)
    store.close()
    with pytest.raises(BulkGone):
        taker.take(manifest, {}, 5.0)


class Workers:
    """vLLM's workers as the loader sees them."""

    def __init__(self) -> None:
        self.takers: list[Taker] = []
        self.taken: list[Any] = [None, None]
        self.reports: list[dict[str, Any]] = [{"problem": "", "version": None, "held": None} for _ in PARTS]
        self.spoil: Any = None
        self.lie = False

    def __call__(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self, method)(rank, *args) for rank in range(len(PARTS))]

    def init_weight_transfer_engine(self, rank: int, info: dict[str, Any]) -> None:
        assert info["tell"] and info["shapes"] == {name: list(shape) for name, shape in SHAPES.items()}
        self.takers.append(Taker(info["run_id"]))

    def cosmos_forget_names(self, rank: int) -> None:
        """They have no queues."""

    def cosmos_boxes(self, rank: int) -> dict[str, Box]:
        return PARTS[rank]

    def start_weight_update(self, rank: int) -> None:
        self.reports[rank]["problem"], self.taken[rank] = "", None

    def update_weights(self, rank: int, every: list[dict[str, Any]]) -> None:
        if rank == 0 and self.spoil is not None:
            self.spoil(every)
        try:
            manifest = manifest_of(every[rank]["manifest"])
            self.taken[rank] = manifest.version, self.takers[rank].take(manifest, PARTS[rank], 5.0)
        except WeightsCorrupt as error:
            for report in self.reports:  # as the workers tell one another
                report["problem"] = f"worker {rank}: {error}"

    def finish_weight_update(self, rank: int) -> None:
        if not any(report["problem"] for report in self.reports):
            version, parts = self.taken[rank]
            digests = {name: tensor_digest(part) for name, part in parts.items()}
            self.reports[rank] |= {"version": str(version), "held": digests if not self.lie else {}}

    def cosmos_read_back(self, rank: int) -> dict[str, bytes]:
        return {name: tensor_digest(part) for name, part in self.taken[rank][1].items()}

    def cosmos_report(self, rank: int) -> dict[str, Any]:
        return dict(self.reports[rank])


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(loading, "end_with_workers", lambda: None)  # the test has no processes that could end,
    monkeypatch.setattr(loading, "forget_names", lambda: None)  # and no queues
    return Workers()


def test_each_worker_is_sent_its_part_and_the_version_is_set_last(workers: Workers) -> None:
    versions: list[str] = []
    loader = loading.PluginLoader(workers, versions.append, SHAPES)
    for version in (5, 1 << 32):
        assert loader.load(TENSORS, version, weights_digest(WEIGHTS)) == weights_digest(WEIGHTS)
    assert versions == ["5", str(1 << 32)] and [report["version"] for report in workers.reports] == ["1.0", "1.0"]
    for rank, parts in enumerate(PARTS):
        taken = workers.taken[rank][1]
        assert all(np.array_equal(taken[name], WEIGHTS[name][index(box)]) for name, box in parts.items())
    assert loader.read_back() == weights_digest(WEIGHTS)
    taken["rows"][0] += 1
    assert loader.read_back() != weights_digest(WEIGHTS)


def test_a_version_that_one_worker_refuses_none_loads(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[str] = []
    loader = loading.PluginLoader(workers, versions.append, SHAPES)
    loader.load(TENSORS, 1, weights_digest(WEIGHTS))
    stores: list[BulkStore] = []

    class Kept(BulkStore):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            stores.append(self)

    monkeypatch.setattr(loading, "BulkStore", Kept)
    workers.spoil = lambda every: flip(stores[0], manifest_of(every[1]["manifest"]), "rows")
    with pytest.raises(WeightsRefused, match="worker 1: .*tensor rows"):
        loader.load(TENSORS, 2, weights_digest(WEIGHTS))
    assert versions == ["1"] and [report["version"] for report in workers.reports] == ["0.1", "0.1"]
    workers.spoil, workers.lie = None, True
    with pytest.raises(WeightsLost, match="worker 0 computes with something else"):
        loader.load(TENSORS, 2, weights_digest(WEIGHTS))
    assert versions == ["1"]


FAMILY = """
import json, multiprocessing, sys, time
from cosmos_actor.roles.vllm_plugin.lives import die_with_parent, end_with_workers

def work():
    die_with_parent()
    time.sleep(60)

if __name__ == "__main__":
    workers = [multiprocessing.get_context("spawn").Process(target=work, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    end_with_workers()
    print(json.dumps([worker.pid for worker in workers]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process and its two workers."""
    (tmp_path / "family.py").write_text(FAMILY)
    process = subprocess.Popen([sys.executable, str(tmp_path / "family.py")], stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    yield process, json.loads(process.stdout.readline())
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def gone(pids: list[int]) -> None:
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the workers", within_s=20)


def test_who_loses_a_worker_says_which_and_ends(family: Any) -> None:
    process, workers = family
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait(20) == LOST_A_WORKER and process.stderr is not None
    assert f"(pid {workers[0]}) of vLLM ended with exit code -9" in process.stderr.read()
    gone(workers)


def test_workers_end_with_who_was_killed(family: Any) -> None:
    process, workers = family
    process.kill()
    gone(workers)


def test_who_ends_by_itself_does_not_miss_its_workers(family: Any) -> None:
    process, workers = family
    _, errors = process.communicate("", timeout=20)
    assert process.returncode == 0 and "ended with exit code" not in errors
    gone(workers)
