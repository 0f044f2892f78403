"""Two hosts, as network namespaces: what is large is streamed, what can be seen in place is not, cables get pulled."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_actor.bus import make_run_keys
from cosmos_actor.bus.bulk.settings import MIB
from tests.netns import Host, skip_reason, two_hosts

pytestmark = [pytest.mark.netns, pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))]
ROLES = ("rollout", "policy", "controller")
SLOW = "40mbit"


class Hosts:
    def __init__(self, left: Host, right: Host, keys: Path, popen: Callable[..., Any]) -> None:
        self.left, self.right, self._keys, self._popen = left, right, keys, popen

    def peer(self, actor: str, **facts: Any) -> str:
        """Starts an actor on the right host; its address."""
        process = self._start(self.right, "tests.bulk.peer", actor=actor, **facts)
        return str(json.loads(process.stdout.readline())["address"])

    def asker(self, mode: str, actor: str, arguments: dict[str, Any], **facts: Any) -> subprocess.Popen[Any]:
        """Starts an actor on the left host that works and prints what it found."""
        return self._start(self.left, "tests.bulk.asker", mode=mode, actor=actor, arguments=arguments, **facts)

    def _start(self, host: Host, module: str, actor: str, **facts: Any) -> subprocess.Popen[Any]:
        key = str(self._keys / (actor.rpartition("-")[0] + ".key"))
        facts = {"actor": actor, "listen": f"tcp://{host.address}:0", "key": key, **facts}
        command = host.command([sys.executable, "-m", module, json.dumps(facts)])
        return self._popen(command, stdout=subprocess.PIPE, text=True)

    def slow(self) -> None:
        for host in (self.left, self.right):
            host.run(["tc", "qdisc", "add", "dev", host.interface, "root", "tbf", "rate", SLOW, "burst", "64kb",
                      "latency", "200ms"], timeout=10)

    def cable(self, state: str) -> None:
        self.left.run(["ip", "link", "set", self.left.interface, state], timeout=10)

    def received_bytes(self) -> int:
        counter = f"/sys/class/net/{self.left.interface}/statistics/rx_bytes"
        return int(self.left.run(["cat", counter], timeout=10).stdout)


@pytest.fixture
def hosts(tmp_path: Path, popen: Callable[..., Any]) -> Iterator[Hosts]:
    make_run_keys(tmp_path / "keys", "run", ROLES)
    with two_hosts() as (left, right):
        yield Hosts(left, right, tmp_path / "keys", popen)


def result(process: subprocess.Popen[Any]) -> dict[str, Any]:
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    return dict(json.loads(output.splitlines()[-1]))


def test_arrays_are_streamed_both_ways_at_once_and_arrive_whole(hosts: Hosts) -> None:
    producer = hosts.peer("rollout-0")
    found = result(hosts.asker("both_ways", "policy-0", {"producer": producer, "size": 5 * MIB + 3, "count": 4}))
    assert found["equal"] and found["sums"]
    assert found["reader"]["views"] == 0 and found["reader"]["streamed"] == 4
    assert found["reader"]["streams"]["done"] == 4


def test_the_controller_on_another_host_passes_references_and_no_bytes(hosts: Hosts) -> None:
    producer, consumer = hosts.peer("rollout-0"), hosts.peer("policy-0")
    arguments = {"producer": producer, "consumer": consumer, "size": 8 * MIB}
    found = result(hosts.asker("pass_on", "controller-0", arguments))
    assert found["sum"]
    assert found["bulk"]["reader"]["streamed"] == 0 and found["bulk"]["store"]["puts"] == 0
    assert hosts.received_bytes() < MIB


def test_small_calls_do_not_wait_for_a_stream_on_a_slow_line(hosts: Hosts) -> None:
    producer = hosts.peer("rollout-0")
    hosts.slow()
    found = result(hosts.asker("one", "policy-0", {"producer": producer, "size": 8 * MIB, "deadline_s": 60.0},
                               chunk_bytes=MIB))
    assert found["outcome"] == "equal"
    assert found["calls"] >= 5 and found["median_call_s"] < found["seconds"] / 4


def test_a_time_limit_on_a_slow_line_names_owner_array_and_progress(hosts: Hosts) -> None:
    producer = hosts.peer("rollout-0")
    hosts.slow()
    found = result(hosts.asker("one", "policy-0", {"producer": producer, "size": 32 * MIB, "deadline_s": 1.5},
                               chunk_bytes=MIB))
    assert found["outcome"].startswith("DeadlineExceeded: ")
    assert "of 32 chunks of array 1 of rollout-0/" in found["outcome"] and "within 1.5 s" in found["outcome"]


@pytest.mark.parametrize("plugged_in_again", [True, False])
def test_a_pulled_cable(hosts: Hosts, plugged_in_again: bool) -> None:
    producer = hosts.peer("rollout-0")
    hosts.slow()
    deadline_s = 60.0 if plugged_in_again else 3.0
    asker = hosts.asker("one", "policy-0", {"producer": producer, "size": 12 * MIB, "deadline_s": deadline_s},
                        chunk_bytes=MIB)
    assert json.loads(asker.stdout.readline()) == {"phase": "fetching"}
    time.sleep(0.5)  # into the middle of the stream, which takes more than two seconds
    hosts.cable("down")
    if plugged_in_again:
        time.sleep(0.5)
        hosts.cable("up")
        assert result(asker)["outcome"] == "equal"
    else:
        outcome = result(asker)["outcome"]
        assert outcome.startswith("DeadlineExceeded: ") and "of 12 chunks of array 1 of rollout-0/" in outcome
