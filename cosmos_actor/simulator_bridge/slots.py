"""Several worlds of one kind as a session."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from .contract import UNKNOWN, Environment, Outcome, SimSession, SlotErrors, WorkUnit

ENDS = (KeyboardInterrupt, GeneratorExit)
"""What ends a process. Other errors of a simulator are charged to it, also those that are no `Exception`."""


class EachSlot(SimSession):
    """One world a slot. What one raises costs no other its episode, and a world that raised is never used again.

        made by `make` ──> raised ──> closed ──reset──> made anew
    """

    def __init__(self, make: Callable[[], Environment], envs: int) -> None:
        """Raises what `make` raises; no world stays open then."""
        self._make = make
        self._closed = False
        self._worlds: List[Optional[Environment]] = []
        try:
            for _ in range(envs):
                self._worlds.append(make())
        except BaseException:
            self.close()
            raise
        self._tells_success = any(
            world is not None and type(world).success is not Environment.success for world in self._worlds)

    def reset(self, slots: Sequence[int], units: Sequence[WorkUnit]) -> None:
        errors: Dict[int, BaseException] = {}
        for slot, unit in zip(slots, units):
            try:
                self._world(slot).reset(unit)
            except ENDS:
                raise
            except BaseException as error:  # whatever it is, it is this slot's failure
                self._raised(slot, error, errors)
        if errors:
            raise SlotErrors(errors)

    def step(self, slots: Sequence[int], actions: np.ndarray) -> Outcome:
        n = len(slots)
        rewards: List[float] = [np.nan] * n
        terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
        success: Optional[np.ndarray] = None
        tells_success = self._tells_success
        errors: Dict[int, BaseException] = {}
        each: Any = actions.tolist() if actions.ndim == 1 and actions.dtype.kind == "i" else actions
        for index, (slot, action) in enumerate(zip(slots, each)):
            try:
                world = self._worlds[slot] or self._world(slot)
                reward, over, cut = world.step(action)
                rewards[index] = float(reward)  # numpy takes None for a NaN
                if over or cut:
                    terminated[index], truncated[index] = over, cut
                if tells_success:
                    told = world.success()
                    if told != UNKNOWN:
                        success = np.full(n, UNKNOWN, np.int8) if success is None else success
                        success[index] = told
            except ENDS:
                raise
            except BaseException as error:
                self._raised(slot, error, errors)
        outcome = Outcome(np.array(rewards, np.float32), terminated, truncated, success)
        if errors:
            raise SlotErrors(errors, outcome)
        return outcome

    def observe(self, slots: Sequence[int]) -> Dict[str, np.ndarray]:
        seen = [(self._worlds[slot] or self._world(slot)).observe() for slot in slots]
        return {name: stacked([each[name] for each in seen]) for name in seen[0]} if seen else {}

    def expert(self, slots: Sequence[int]) -> np.ndarray:
        return np.stack([np.asarray((self._worlds[slot] or self._world(slot)).expert()) for slot in slots])

    def close(self) -> None:
        """Every world, also if one of them raises; raises the first of those errors."""
        errors: Dict[int, BaseException] = {}
        self._closed = True
        for slot, world in enumerate(self._worlds):
            self._worlds[slot] = None
            try:
                if world is not None:
                    world.close()
            except Exception as error:
                errors[slot] = error
        if errors:
            raise next(iter(errors.values()))

    def _world(self, slot: int) -> Environment:
        world = self._worlds[slot]
        if self._closed:
            raise RuntimeError("the session is closed")
        if world is None:
            world = self._worlds[slot] = self._make()
        return world

    def _raised(self, slot: int, error: BaseException, errors: Dict[int, BaseException]) -> None:
        errors[slot] = error
        world, self._worlds[slot] = self._worlds[slot], None
        try:
            if world is not None:
                world.close()
        except Exception:  # noqa: S110 (it has raised before; why it fell apart is in `errors`)
            pass


def stacked(arrays: List[Any]) -> np.ndarray:
    """As np.stack, in a quarter of its time for many small arrays of one kind."""
    if not all_alike(arrays):
        return np.stack(arrays)
    return np.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)


def all_alike(arrays: List[Any]) -> bool:
    """Whether they are arrays of one dtype and one shape with a dimension or more, and there is one."""
    n = len(arrays)
    if not n or list(map(type, arrays)).count(np.ndarray) < n:
        return False
    shape, dtype = arrays[0].shape, arrays[0].dtype
    return bool(shape) and [array.shape for array in arrays].count(shape) == n and [
        array.dtype for array in arrays].count(dtype) == n
