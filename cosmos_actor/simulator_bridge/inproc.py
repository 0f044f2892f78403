"""A simulator in the process of the job, for debugging: its steps run on the loop's own thread, under one stack."""

from __future__ import annotations

import asyncio
from typing import Any, Callable

from .attach import described, make_server, opened
from .plugins import SimulatorName, load
from .server import Ending, Place

CLOSE_S = 5.0
"""For its farewell; the whole job ends then."""


class InprocSimulator:
    """Attached from now until `close`. To be made on a running loop. Raises Mistake for what can not be loaded."""

    def __init__(self, name: SimulatorName, envs: int, place: Place, transport: Callable[[], Any]) -> None:
        simulator = load(name)
        description = described(simulator, str(name), envs)
        self._session = opened(simulator, str(name), envs)
        self._server = make_server(simulator, description, self._session, envs, place, transport=transport)
        self._task = asyncio.ensure_future(self._server.run())

    async def close(self) -> None:
        self._server.leave(Ending(0, "the run is over"))
        await asyncio.wait([self._task], timeout=CLOSE_S)
        self._task.cancel()
        self._session.close()
