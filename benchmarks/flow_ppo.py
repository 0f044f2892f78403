"""PPO of a small flow policy under different settings: how far it moves in an update, and what it gains.

    python benchmarks/flow_ppo.py [--case NAME …] [--updates 100] [--seed 0] [--json FILE]

A vla is shown an expert for a moment, then trained by PPO, with trainer and engine in this process and no bus. The
task: go to the red or to the blue spot, as the instruction says, seen in a picture of 16 x 16 and told in the state
where the spots are. An update has 32 slots x 12 decisions, each a chunk of 4 actions; an episode has 20 actions.

    exploring   successes of the episodes that PPO trains on, with the sampler's noise, 10 updates together
    no noise    of 400 trials before PPO and after it: in the 40 worlds that PPO trains in, and in fresh ones
    kl/old      median over the updates that train the actor, nats a decision to the policy that acted

Standard errors: 0.025 of 400 trials, 0.016 of ten updates' episodes, about 1,000. One seed is one sample of the rest.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_actor.roles.control_engine import ControlEngine
from cosmos_actor.simulator_bridge.contract import BOX, ActionSpec, ArraySpec, Description, TaskSpec
from cosmos_actor.trainer.control import ControlTrainer
from cosmos_actor.trainer.control_scorer import ControlScorer
from cosmos_actor.trainer.control_settings import ControlSettings
from cosmos_actor.trainer.instructions import Instructions, observations_of
from cosmos_actor.weight_plane.digest import weights_digest

COLOURS = {"red": 0, "blue": 2}
SIDE, NEAR, STEP, EPISODE = 16, 0.15, 0.2, 20
CHUNK, SLOTS, DECISIONS = 4, 32, 12
WORLDS, SHOWN_FROM, FRESH_FROM, TRIALS = 40, 100_000, 200_000, 400
DEMONSTRATIONS, CLONING, SHOWN_ROWS, CRITIC_FIRST = 300, 200, 64, 2
SHOWS = {"image": ArraySpec("uint8", (SIDE, SIDE, 3)), "state": ArraySpec("float32", (6,))}
ACTION = ActionSpec(BOX, shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
TASKS = [TaskSpec(name, EPISODE, instruction=f"go to the {name} spot") for name in COLOURS]
DESCRIPTION = Description("", TASKS, SHOWS, ACTION)
SPECS, TOLD = observations_of(DESCRIPTION, kind="vla"), Instructions(DESCRIPTION, kind="vla").told
LAST_TWO = {"flow": {"noisy_steps": 2, "eta": 0.7}}
CASES: dict[str, dict[str, dict[str, Any]]] = {  # what differs from the first
    "all steps noisy, 0.02 nats": {},
    "too long steps": {"ppo": {"learning_rate": 4e-4}},
    "last two steps noisy": LAST_TWO,
    "four passes with target_kl": {**LAST_TWO, "ppo": {"epochs": 4, "target_kl": 0.04}},
    "towards the cloned policy": {**LAST_TWO, "ppo": {"kl_coefficient": 0.1}},
}


class World:
    """One episode, a function of its seed and the actions: even seeds go to the red spot, odd ones to the blue."""

    def __init__(self, seed: int) -> None:
        self.task, draw = list(COLOURS)[seed % 2], np.random.default_rng([seed, 1])
        self.at = draw.uniform(-0.9, 0.9, 2)
        self.spots = {name: draw.uniform(-0.8, 0.8, 2) for name in COLOURS}
        self.steps, self.reached, self.over = 0, False, False

    def play(self, chunk: np.ndarray) -> float:
        """Takes the actions [K, 2] until the episode is over. Returns the reward."""
        for action in chunk[:EPISODE - self.steps]:
            self.at = np.clip(self.at + STEP * np.clip(action, -1, 1), -1, 1)
            self.steps += 1
            self.reached = bool(np.abs(self.spots[self.task] - self.at).max() < NEAR)
            if self.reached:
                break
        self.over = self.reached or self.steps == EPISODE
        return float(self.reached)

    def expert(self) -> np.ndarray:
        return np.clip((self.spots[self.task] - self.at) / STEP, -1, 1).astype(np.float32)

    def observe(self) -> dict[str, np.ndarray]:
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        for place, channel in [*((self.spots[name], channel) for name, channel in COLOURS.items()), (self.at, 1)]:
            row, column = ((place + 1) / 2 * (SIDE - 2)).astype(int)
            image[row:row + 2, column:column + 2, channel] = 255
        return {"image": image, "state": np.concatenate([self.at, *self.spots.values()]).astype(np.float32)}


def observe(worlds: list[World]) -> dict[str, np.ndarray]:
    """Name -> [n, …]"""
    seen, told = [world.observe() for world in worlds], TOLD([world.task for world in worlds])
    return {**{name: np.stack([one[name] for one in seen]) for name in seen[0]}, **told}


def settings_of(case: str) -> ControlSettings:
    flow = {"chunk": CHUNK, "correlation": 0.8, "width": 32, "heads": 2, "layers": 1, "head_layers": 2}
    ppo = {"learning_rate": 1e-4, "value_learning_rate": 1e-3, "anneal": False, "epochs": 2,
           "entropy_coefficient": 0.0, "critic_first": CRITIC_FIRST}
    return ControlSettings.model_validate({
        "network": {"kind": "vla", "shared": True}, "cloning": {"learning_rate": 1e-3, "shift": 0},
        "flow": {**flow, **CASES[case].get("flow", {})}, "ppo": {**ppo, **CASES[case].get("ppo", {})}})


def demonstrations(draw: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Columns of Shown: the expert's actions where it stands, while it is pushed about."""
    seen, actions, masks = [], [], []
    for number in range(DEMONSTRATIONS):
        world, shown = World(SHOWN_FROM + number), []
        while not world.over:
            seen.append(observe([world]))
            shown.append(world.expert())
            world.play([shown[-1] + 0.2 * draw.standard_normal(2)])
        wanted = np.arange(len(shown))[:, None] + np.arange(CHUNK)
        actions.append(np.stack(shown)[np.minimum(wanted, len(shown) - 1)])
        masks.append((wanted < len(shown)).astype(np.uint8))
    columns = {name: np.concatenate([one[name] for one in seen]) for name in SPECS}
    return columns, np.concatenate(actions), np.concatenate(masks)


def trials(engine: ControlEngine) -> list[float]:
    """Success without noise: in the worlds that PPO trains in, and in fresh ones."""
    worlds = [World(n % WORLDS) for n in range(TRIALS)] + [World(FRESH_FROM + n) for n in range(TRIALS)]
    while live := [(number, world) for number, world in enumerate(worlds) if not world.over]:
        start = engine.start([(number, world.steps) for number, world in live])
        chunks = engine.commands(engine.act(observe([world for _, world in live]), start)[0])
        for (_, world), chunk in zip(live, chunks, strict=True):
            world.play(chunk)
    return [statistics.fmean(world.reached for world in half) for half in (worlds[:TRIALS], worlds[TRIALS:])]


def explore(engine: ControlEngine, draw: np.random.Generator) -> Iterator[tuple[dict[str, Any], list[bool]]]:
    """Fields of a ControlBatch, a fragment of each slot, and whether each episode that ended has succeeded."""
    following = (World(number % WORLDS) for number in count(1))
    worlds = list(islice(following, SLOTS))
    while True:
        rows, ended = [], []
        for _ in range(DECISIONS):
            seen = observe(worlds)
            actions, logprobs, values = engine.act(seen, engine.noise(draw, SLOTS))
            rewards = [world.play(chunk) for world, chunk in zip(worlds, engine.commands(actions), strict=True)]
            over = np.array([world.over for world in worlds])
            rows.append({**seen, "actions": actions, "logprobs": logprobs, "values": values, "boundary": over,
                         "rewards": np.array(rewards, np.float32), "bootstrap": np.zeros(SLOTS, np.float32)})
            ended += [world.reached for world in worlds if world.over]
            worlds = [next(following) if world.over else world for world in worlds]
        rest = engine.values(observe(worlds))  # of episodes that go on in the next update
        rows[-1].update(boundary=np.ones(SLOTS, bool), bootstrap=np.where(rows[-1]["boundary"], 0, rest))
        batch = {name: np.concatenate(np.stack([row[name] for row in rows], axis=1)) for name in rows[0]}
        yield {"observations": {name: batch.pop(name) for name in SPECS}, **batch}, ended


def measure(case: str, updates: int, seed: int) -> dict[str, Any]:
    settings, draw, versions = settings_of(case), np.random.default_rng(seed), count(1)
    engine = ControlEngine(settings, SPECS, ACTION)
    trainer = ControlTrainer(settings, SPECS, ACTION, seed=seed, total_updates=updates, cloning_updates=CLONING)

    def publish() -> None:
        weights = trainer.weights()
        engine.load_weights(weights, next(versions), weights_digest(weights))

    shown, actions, mask = demonstrations(draw)
    choose = copy.deepcopy(draw)  # PPO draws the same however long was cloned
    for _ in range(CLONING):
        rows = choose.integers(0, len(actions), SHOWN_ROWS)
        seen = {name: column[rows] for name, column in shown.items()}
        trainer.clone({"observations": seen, "actions": actions[rows], "mask": mask[rows]})
    publish()
    before, ended, moved = trials(engine), [], []
    reference = ControlScorer(copy.deepcopy(trainer.model), threads=1)
    for batch, outcomes in islice(explore(engine, draw), updates):
        if settings.ppo.kl_coefficient > 0:
            batch["reference_logprobs"] = reference.score(batch["observations"], batch["actions"])[0]
        moved.append(trainer.update(batch)["kl/old"])
        ended.append(outcomes)
        publish()
    exploring = [statistics.fmean(sum(some, [])) for some in (ended[:10], ended[-10:])]
    return {"case": case, "seed": seed, "updates": updates, "exploring": exploring, "before": before,
            "after": trials(engine), "kl/old": statistics.median(moved[CRITIC_FIRST:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="; ".join(CASES))
    parser.add_argument("--updates", type=int, default=100, help=f"of PPO, more than {CRITIC_FIRST}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    print(f"{'':28}{'exploring':>19}{'no noise: trained':>19}{'fresh':>19}{'kl/old':>10}", flush=True)
    found = []
    for case in given.case:
        found.append(row := measure(case, given.updates, given.seed))
        pairs = row["exploring"], *zip(row["before"], row["after"], strict=True)
        told = [f"{first:9.3f} -> {last:.3f}" for first, last in pairs]
        print(f"{case:28}", *told, f"{row['kl/old']:9.3f}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
