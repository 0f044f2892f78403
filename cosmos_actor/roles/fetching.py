"""How a role comes by a version: fetched, taken, and fetched again as long as its bytes turn out to be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from cosmos_actor.actors.context import Context
from cosmos_actor.bus.errors import DeadlineExceeded
from cosmos_actor.roles.engine import WeightsSpoiled
from cosmos_actor.roles.messages import WeightsAlarm
from cosmos_actor.weight_plane.errors import WeightsCorrupt
from cosmos_actor.weight_plane.manifest import Manifest

MOST_PULLS = 4
"""How often a version is fetched whose bytes come damaged. Damage that stays is reported as a version not taken."""
PULL_AGAIN_S = 0.5
"""Between two of them: whoever published it is told of the first, and puts right what lies damaged there."""

Taken = TypeVar("Taken")


async def fetched(context: Context, manifest: Manifest, topic: str,
                  take: Callable[[Mapping[str, Any]], Awaitable[Taken]]) -> Taken:
    """What `take` makes of the tensors. Bytes that are wrong are an alarm each time, whoever finds them: the pull, or
    `take` (WeightsSpoiled) where they fell over in this actor's own memory.

    Raises what pulling and `take` raise; damage that stays as WeightsCorrupt or WeightsSpoiled.
    """
    weights, now = context.weights, context.clock.monotonic
    assert weights is not None
    version = manifest.version
    until = now() + context.settings.weights.deadline_s
    for left in reversed(range(MOST_PULLS)):
        try:
            with context.waiting(f"the tensors of weights {version.step}", "policy"):
                tensors = await weights.pull(manifest, until - now())
            try:
                return await take(tensors)
            except BaseException:  # also the end of the link that announced it: over the next it is announced again
                weights.doubt(version)
                raise
            finally:
                del tensors  # their memory is what the next version may be fetched into
        except (WeightsCorrupt, WeightsSpoiled) as error:
            tensor = error.tensor if isinstance(error, WeightsCorrupt) else "(all)"
            await context.emit(WeightsAlarm(context.identity.actor, version.epoch, version.step, tensor, str(error),
                                            left, topic))
            if not left or until - now() <= PULL_AGAIN_S:
                raise
            await asyncio.sleep(PULL_AGAIN_S)
        except DeadlineExceeded as error:
            if error.setting is not None:
                raise
            raise DeadlineExceeded(error.text, peer=error.peer, setting="weights.deadline_s") from error
    raise AssertionError("unreachable")
