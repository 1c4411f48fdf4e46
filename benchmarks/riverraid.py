"""The parking exploit of Riverraid: scripted policies under every reward, with and without the options against it.

python benchmarks/riverraid.py      # writes benchmarks/riverraid/exploit.csv and prints it as a table
"""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bestiary.envs import Riverraid
from bestiary.envs.riverraid import ACTIONS, reward_weights
from bestiary.training.evaluation import rescored
from bestiary.types import Episode

TABLE = Path(__file__).parent / "riverraid" / "exploit.csv"
REWARDS = ("score", "fuel:10", "pacifist:20", "move:5", "centre:1")
NO_FIRE = [n for n, name in enumerate(ACTIONS) if "FIRE" not in name]
EPISODES = 8
LIMIT = 10_800  # frames: a tenth of the default, to save time

POLICIES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "no-op": lambda rng, n: np.zeros(n, np.int64),
    "random": lambda rng, n: rng.integers(0, len(ACTIONS), n),
    "random without fire": lambda rng, n: rng.choice(NO_FIRE, n),
}
VARIANTS = {
    "default": Riverraid(time_limit_frames=LIMIT),
    "--env.stall 50": Riverraid(time_limit_frames=LIMIT, stall=50),
    "--env.launch": Riverraid(time_limit_frames=LIMIT, launch=True),
    "--env.launch --env.end-at-crash": Riverraid(time_limit_frames=LIMIT, launch=True, end_at_crash=True),
}


def run(env: Riverraid, choose: Callable[[np.random.Generator, int], np.ndarray]) -> list[Episode]:
    """The first episode of every slot."""
    env_batch, rng = env.make(EPISODES, 0, 0, 1), np.random.default_rng(0)
    env_batch.reset()
    found: dict[int, Episode] = {}
    while len(found) < EPISODES:
        for e in env_batch.step(torch.from_numpy(choose(rng, EPISODES)))[1]:
            found.setdefault(e.slot, e)
    env_batch.close()
    return list(found.values())


def row(policy: str, variant: str, episodes: list[Episode]) -> dict[str, str]:
    returns = {r: np.mean([rescored(e, reward_weights(r)).score for e in episodes]) for r in REWARDS}
    steps = sum(e.steps for e in episodes)
    shares = {name: sum(e.components[name] for e in episodes) / steps for name in ("parked", "dead")}
    return {
        "policy": policy,
        "options": variant,
        "steps per episode": f"{steps / len(episodes):.0f}",
        **{name: f"{value:.0f}" for name, value in returns.items()},
        **{name: f"{value:.2f}" for name, value in shares.items()},
    }


def main() -> None:
    rows = [row(p, v, run(env, choose)) for p, choose in POLICIES.items() for v, env in VARIANTS.items()]
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", newline="") as file:
        lines = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for found in rows:
        print("| " + " | ".join(found.values()) + " |")


if __name__ == "__main__":
    main()
