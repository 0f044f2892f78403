"""A policy, a controller and rollouts in processes of their own, and what is said to them and heard from them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cosmos_actor.bus import make_run_keys
from cosmos_actor.bus.bulk.settings import MIB
from tests.netns import Host

START_S = 30.0


class Player:
    """One process of `player`. What it says is kept until somebody asks for it."""

    def __init__(self, actor: str, process: subprocess.Popen[str]) -> None:
        self.actor, self.process = actor, process
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.address = self.hear("address", START_S)["address"]

    def say(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, word: str, within_s: float) -> dict[str, Any]:
        """The next thing it says that has this word in it; what it says before is forgotten."""
        until = time.monotonic() + within_s
        while True:
            try:
                said = self._said.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.actor} did not say {word!r} within {within_s:g} s") from None
            if said is None:
                raise AssertionError(f"{self.actor} ended before it said {word!r}")
            if word in said:
                return said

    def send_signal(self, signal: int) -> None:
        os.kill(self.process.pid, signal)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)


class World:
    """Starts actors and publishes versions to them. Without `hosts` each actor only seems to be a host of its own."""

    def __init__(self, popen: Callable[..., subprocess.Popen[str]], folder: Path, *, mib: int = 8,
                 bucket_bytes: int | None = 2 * MIB, chunk_bytes: int = MIB, fan_out: bool = True,
                 patience_s: float = 1.0, deadline_s: float = 30.0,
                 hosts: Mapping[str, Host] | None = None, **bulk: Any) -> None:
        self._popen, self._hosts = popen, hosts
        self._keys = make_run_keys(folder / "keys", "run", ("policy", "controller", "rollout"))
        self._other_keys = make_run_keys(folder / "other", "run", ("policy", "controller", "rollout"))
        self._rollout = {"fan_out": fan_out, "patience_s": patience_s, "deadline_s": deadline_s}
        self._policy = {"mib": mib, "bucket_bytes": bucket_bytes}
        self._bulk = {"budget_bytes": (3 * mib + 16) * MIB, "chunk_bytes": chunk_bytes, **bulk}
        self.chunks = mib * MIB // chunk_bytes
        self.deadline_s = deadline_s
        self.epoch, self.step = 0, 0
        self.digests = {"": "none"}
        self.controller = self._start("controller-0", patience_s=patience_s)
        self.policy = self.start_policy()
        self.rollouts: dict[str, Player] = {}

    def start_policy(self) -> Player:
        """A new life of it; its versions are newer than all before."""
        self.epoch += 1
        self.policy = self._start("policy-0", **self._policy)
        return self.policy

    def start_rollout(self, actor: str, *, wrong_key: bool = False, wait: bool = True, **options: Any) -> Player:
        if wrong_key:
            options["wrong_key"] = str(self._other_keys["rollout"])
        player = self._start(actor, desk=self.controller.address, **{**self._rollout, **options})
        self.rollouts[actor] = player
        if wait:
            while self.controller.hear("up", START_S)["up"] != actor:
                pass
        return player

    def publish(self) -> str:
        """The next version: published and announced. Returns its digest."""
        self.step += 1
        self.policy.say(publish=[self.epoch, self.step])
        said = self.policy.hear("manifest", START_S)
        self.digests[said["digest"]] = f"{self.epoch}.{self.step}"
        self.controller.say(announce=said["manifest"])
        return str(said["digest"])

    def reports(self, actors: set[str], within_s: float) -> dict[str, dict[str, Any]]:
        """What each of these says of the version that was announced last, and after how long."""
        until, found = time.monotonic() + within_s, {}
        while actors - set(found):
            try:
                said = self.controller.hear("report", until - time.monotonic())
            except AssertionError as error:
                raise AssertionError(f"{sorted(actors - set(found))} did not report: {error}") from None
            report = said["report"]
            if (report["epoch"], report["step"]) == (self.epoch, self.step):
                found[report["actor"]] = {**report, "after_s": said["after_s"]}
        return found

    def everybody_takes(self, digest: str, within_s: float, but: frozenset[str] = frozenset()) -> dict[str, Any]:
        """The reports; fails unless all present rollouts `but` those hold the version whole."""
        reports = self.reports(set(self.rollouts) - but, within_s)
        wrong = {actor: report for actor, report in reports.items() if report["problem"] or report["digest"] != digest}
        assert not wrong, wrong
        return reports

    def desk_statistics(self) -> dict[str, Any]:
        self.controller.say(statistics=True)
        return dict(self.controller.hear("statistics", START_S)["statistics"])

    def _start(self, actor: str, **options: Any) -> Player:
        host = None if self._hosts is None else self._hosts[actor]
        address = "127.0.0.1" if host is None else host.address
        facts = {"actor": actor, "listen": f"tcp://{address}:0", "key": str(self._keys[actor.rpartition("-")[0]]),
                 "bulk": self._bulk, "host": actor if host is None else "", **options}
        command = [sys.executable, "-m", "tests.weight_plane.fan_out.player", json.dumps(facts)]
        return Player(actor, self._popen(command if host is None else host.command(command), stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}))
