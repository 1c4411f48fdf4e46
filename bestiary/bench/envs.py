"""Speed of the memory tasks: as a vector environment, as an EnvBatch, and as a single environment."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bestiary.bench import medians
from bestiary.envs import KeyToDoor, TMaze, VisualMatch
from bestiary.seeding import TRAIN

TASKS = {
    "TMazePassive": TMaze(),
    "TMazeActive": TMaze(active=True),
    "VisualMatch": VisualMatch(),
    "KeyToDoor": KeyToDoor(),
}


@dataclass(frozen=True)
class EnvsBench:
    """bestiary bench envs"""

    envs: int = 64
    """environments per batch"""
    steps: int = 500
    """vector steps per round"""
    rounds: int = 9
    """timings per alternative; medians are reported"""


def sides(cfg: EnvsBench, name: str) -> dict[str, Callable[[], object]]:
    """`cfg.steps` steps of a random policy; the single environment takes as many steps as one slot of the others."""
    actions = np.random.default_rng(0).integers(0, 4, (cfg.steps, cfg.envs))
    vector = gymnasium.make_vec(f"bestiary/{name}-v0", num_envs=cfg.envs)
    env_batch = TASKS[name].make(cfg.envs, 0, TRAIN, 1)
    single = gymnasium.make(f"bestiary/{name}-v0")
    vector.reset(seed=0)
    env_batch.reset()
    single.reset(seed=0)

    def step_vector() -> None:
        for action in actions:
            vector.step(action)

    def step_env_batch() -> None:
        for action in torch.from_numpy(actions):
            env_batch.step(action)

    def step_single() -> None:
        for action in actions.flat[:: cfg.envs]:
            if single.step(action)[2]:
                single.reset()

    return {"vector": step_vector, "env_batch": step_env_batch, "single": step_single}


def main(cfg: EnvsBench) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    title = f"steps/s, random policy, {cfg.envs} environments, one thread"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for column in ("task", "vector environment", "EnvBatch (TimeStep tensors)", "single environment"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name in TASKS:
        seconds = medians(sides(cfg, name), cfg.rounds)
        steps = {"vector": cfg.steps * cfg.envs, "env_batch": cfg.steps * cfg.envs, "single": cfg.steps}
        results[name] = {side: steps[side] / seconds[side] for side in steps}
        table.add_row(name, *(f"{rate:,.0f}" for rate in results[name].values()))
    Console(width=110).print(table)
    return results
