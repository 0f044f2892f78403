"""A publisher's store that is served over plain TCP."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cosmos_actor.bus.bulk.settings import MIB
from cosmos_actor.weight_plane.transports import raw_server as raw_server_module
from cosmos_actor.weight_plane.transports.serving import ServedStore
from tests.bulk.tools import served, store

THREADS = 4


def test_threads_that_are_all_at_the_first_put_start_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, listened = raw_server_module.listen, []
    together = threading.Barrier(THREADS, timeout=10)

    def slowly(host: str):
        made = listen(host)
        listened.append(made)
        threading.Event().wait(0.2)  # the others come to it meanwhile
        return made

    monkeypatch.setattr(raw_server_module, "listen", slowly)
    with store(64 * MIB) as made, served(made):
        published = ServedStore(made)
        refs = []

        def put(number: int) -> None:
            together.wait()
            refs.append(published.try_put(np.full(10, number), holder="a"))

        threads = [threading.Thread(target=put, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        try:
            assert len(listened) == 1 and {ref.address for ref in refs} == {published._server.address}
        finally:
            published.close()
