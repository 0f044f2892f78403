"""Pictures that travel smaller: the same bytes, and nothing believed that the description does not say."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, Dict

import numpy as np
import pytest

from cosmos_actor.simulator_bridge import server
from cosmos_actor.simulator_bridge.contract import ArraySpec
from cosmos_actor.simulator_bridge.gateway import Gateway
from cosmos_actor.simulator_bridge.messages import Stepped
from cosmos_actor.simulator_bridge.squeezed import BadSqueeze, squeezed, unsqueezed
from tests.simulator_bridge.driver import Attaching, assigned
from tests.simulator_bridge.driving import attached, driving, step
from tests.simulator_bridge.worlds import Painter, PainterSimulator, unit

SPECS = {"image": ArraySpec("uint8", (20, 30, 3)), "state": ArraySpec("float32", (4,)),
         "flags": ArraySpec("uint8", (6,))}
n, K = 3, 4


def stepped(even: bool = True) -> Stepped:
    """Slot 1 of three has ended."""
    draw = np.random.default_rng(0)

    def seen(*leading: int) -> Dict[str, Any]:
        high = 2 if even else 256
        return {"image": draw.integers(0, high, (*leading, 20, 30, 3)).astype(np.uint8),
                "state": draw.normal(size=(*leading, 4)).astype(np.float32),
                "flags": draw.integers(0, 2, (*leading, 6)).astype(np.uint8)}

    rows = np.array([[0, 4, 0, 0, -1], [1, 2, 1, 0, 1], [2, 4, 0, 0, -1]], np.int32)
    return Stepped(7, seen(n), np.zeros((n, K), np.float32), rows, seen(1), seen(n, K - 1))


def same(one: Stepped, two: Stepped) -> bool:
    return all(np.array_equal(getattr(one, field)[name], getattr(two, field)[name]) and
               getattr(one, field)[name].dtype == getattr(two, field)[name].dtype
               for field in ("observations", "final_observations", "intermediate") for name in SPECS)


@pytest.mark.parametrize("even", [True, False])
def test_what_is_made_whole_is_what_was_seen(even: bool) -> None:
    was = stepped(even)
    sent = squeezed(was, SPECS)
    assert same(unsqueezed(sent, SPECS), was)
    small = sent.observations["image"]
    assert (small.ndim == 1 and small.nbytes < was.observations["image"].nbytes / 4) is even  # noise stays as it is
    assert sent.observations["state"] is was.observations["state"]
    assert sent.observations["flags"] is was.observations["flags"]


def test_what_was_never_made_smaller_passes() -> None:
    was = stepped()
    assert same(unsqueezed(was, SPECS), was)
    reset = replace(was, rewards=np.zeros((n, 0), np.float32), intermediate={})
    assert same(replace(unsqueezed(squeezed(reset, SPECS), SPECS), intermediate=was.intermediate), was)


@pytest.mark.parametrize("bad", [b"", b"no zlib at all", zlib.compress(bytes(100)), zlib.compress(bytes(10**7)),
                                 zlib.compress(bytes(n * 1800))[:-6]], ids=["empty", "garbage", "short", "bomb", "cut"])
def test_what_is_not_as_described_is_refused(bad: bytes) -> None:
    sent = squeezed(stepped(), SPECS)
    sent.observations["image"] = np.frombuffer(bad, np.uint8)
    with pytest.raises(BadSqueeze, match="observation image"):
        unsqueezed(sent, SPECS)


@pytest.mark.parametrize("squeeze", ["none", "zlib"])
def test_a_driver_on_another_host_gets_the_same(keys: Any, monkeypatch: pytest.MonkeyPatch, squeeze: str) -> None:
    sent, seen = [], []
    real = server.squeezed
    monkeypatch.setattr(server, "host_id", lambda: "somewhere else")
    monkeypatch.setattr(server, "squeezed", lambda *given: sent.append(real(*given)) or sent[-1])

    async def play(gateway: Gateway, address: str) -> None:
        Attaching(address, keys["simulator"], simulator=PainterSimulator())
        simulator = await attached(gateway, lane=False)
        units = {slot: unit("paint", seed=slot) for slot in simulator.slots}
        seen.append(await simulator.reset(assigned(units), deadline_s=10.0))
        for _ in range(3):
            actions = np.ones((2, 2, 2), np.float32)
            seen.append(await step(simulator, actions, intermediate=True))

    driving(keys, play, squeeze=squeeze, shared_bytes=0)
    assert bool(sent) is (squeeze == "zlib")
    for one in seen:
        assert one.observations["front"].shape == (2, 8, 24, 3) and one.observations["wrist"].shape == (2, 12, 16, 3)
    world = Painter()
    world.reset(unit("paint", seed=1))
    for one in seen:
        assert np.array_equal(one.observations["wrist"][1], world.observe()["wrist"])
        for _ in range(2):
            world.step(np.ones(2, np.float32))
