"""Several hosts on one machine: network namespaces at one switch, each line as slow as asked.

    with star(["policy", "rollout-0"], rate="200mbit") as hosts:
        hosts["policy"].popen([python, "publisher.py", hosts["policy"].address])

After the block no process of any host, no namespace and no interface is left, also when the body raised.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.netns import PREFIX, Host, _ip, _numbers, _remove, _remove_of_dead_owners

BURST = "256kb"
"""More than the line carries between two ticks of the kernel's timer, or it would be slower than asked."""
QUEUE = "100ms"


@contextmanager
def star(names: Sequence[str], rate: str = "", shaped: Sequence[str] | None = None) -> Iterator[dict[str, Host]]:
    """Fresh hosts 10.78.x.1, .2, …; `rate` limits each direction of the lines of `shaped` (all, when it is None)."""
    _remove_of_dead_owners()
    number = next(_numbers)
    switch = f"{PREFIX}-{os.getpid()}-{number}switch"
    hosts = {name: Host(f"{PREFIX}-{os.getpid()}-{number}n{index}", f"10.78.{number % 250}.{index + 1}", "line")
             for index, name in enumerate(names)}
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for index, (name, host) in enumerate(hosts.items()):
            _plug_in(switch, f"port{index}", host, rate if shaped is None or name in shaped else "")
        yield hosts
    finally:
        for host in hosts.values():
            _remove(host.name)
        _remove(switch)


def sent_bytes(host: Host) -> int:
    """What the host has sent since it was made, all layers included."""
    return int(_ip("netns", "exec", host.name, "cat", f"/sys/class/net/{host.interface}/statistics/tx_bytes"))


def _plug_in(switch: str, port: str, host: Host, rate: str) -> None:
    _ip("netns", "add", host.name)
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("link", "add", host.interface, "netns", host.name, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _ip("-n", switch, "link", "set", port, "master", "bridge")
    for namespace, interface in ((switch, port), (host.name, host.interface)):
        _ip("-n", namespace, "link", "set", interface, "up")
        if rate:
            _ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate,
                "burst", BURST, "latency", QUEUE)
