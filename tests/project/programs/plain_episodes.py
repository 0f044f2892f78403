"""Run in a simulator's environment: gymnasium's episodes without us. Prints a line of JSON: their moments' digests.

    python plain_episodes.py '{"id": …, "module": …, "options": {…}, "wrappers": […], "seeds": […]}' ACTIONS.npy

Each episode has an environment of its own, so nothing that an earlier one left can matter. `ACTIONS.npy`: [N, T, ...].
"""

import contextlib
import hashlib
import importlib
import json
import sys
from typing import Any

import numpy as np

META_WORLD = "Meta-World/"


def arrays(seen: Any) -> Any:
    """In the order of their names: what a policy would be given, float64 as float32."""
    if isinstance(seen, dict):
        for name in sorted(seen):
            yield from arrays(seen[name])
    elif not isinstance(seen, str):
        array = np.asarray(seen)
        yield array.astype(np.float32) if array.dtype == np.float64 else array


def digest(seen: Any, reward: Any = 0.0, terminated: Any = False, truncated: Any = False) -> str:
    whole = hashlib.sha256()
    for array in arrays(seen):
        whole.update(np.ascontiguousarray(array).tobytes())
    whole.update(np.float32(reward).tobytes() + bytes([bool(terminated), bool(truncated)]))
    return whole.hexdigest()


def episode(gymnasium: Any, asked: Any, seed: int, actions: Any) -> "list[str]":
    env = gymnasium.make(asked["id"], **asked["options"])
    for module, name, options in asked["wrappers"]:
        env = getattr(importlib.import_module(module), name)(env, **options)
    rendered = asked["options"].get("render_mode") == "rgb_array"
    if rendered:  # the camera stays where it stands now
        env.reset(seed=0)
        env.render()

    def look(seen: Any) -> Any:
        return {"image": env.render(), "state": seen} if rendered else seen

    if asked["id"].startswith(META_WORLD):  # it chooses a goal before it hears the seed
        env.unwrapped.np_random = gymnasium.utils.seeding.np_random(seed)[0]
    seen, _ = env.reset(seed=seed)
    digests = [digest(look(seen))]
    for action in actions:
        discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        action = env.action_space.start + action if discrete else action.astype(env.action_space.dtype)
        seen, reward, terminated, truncated, _ = env.step(action)
        digests.append(digest(look(seen), reward, terminated, truncated))
        if terminated or truncated:
            break
    env.close()
    return digests


def main() -> None:
    asked, actions = json.loads(sys.argv[1]), np.load(sys.argv[2])
    with contextlib.redirect_stdout(sys.stderr):
        if asked["module"]:
            importlib.import_module(asked["module"])
        gymnasium = importlib.import_module("gymnasium")
        told = [episode(gymnasium, asked, seed, one) for seed, one in zip(asked["seeds"], actions, strict=True)]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
