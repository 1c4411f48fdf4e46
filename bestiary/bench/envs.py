"""How fast the memory tasks are: as a vector environment, as a world of rows, and one environment alone."""

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
class Settings:
    """bestiary bench envs"""

    envs: int = 64
    steps: int = 500
    """of all environments, per round"""
    rounds: int = 9


def sides(cfg: Settings, name: str) -> dict[str, Callable[[], object]]:
    """Random play of `cfg.steps` steps; the single environment takes as many as each of the others."""
    chosen = np.random.default_rng(0).integers(0, 4, (cfg.steps, cfg.envs))
    vector = gymnasium.make_vec(f"bestiary/{name}-v0", num_envs=cfg.envs)
    env_batch = TASKS[name].make(cfg.envs, 0, TRAIN, 1)
    alone = gymnasium.make(f"bestiary/{name}-v0")
    vector.reset(seed=0)
    env_batch.reset()
    alone.reset(seed=0)

    def play_vector() -> None:
        for action in chosen:
            vector.step(action)

    def play_world() -> None:
        for action in torch.from_numpy(chosen):
            env_batch.step(action)

    def play_alone() -> None:
        for action in chosen.flat[:: cfg.envs]:
            if alone.step(action)[2]:
                alone.reset()

    return {"vector": play_vector, "world": play_world, "single": play_alone}


def main(cfg: Settings) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    title = f"steps/s, random play, {cfg.envs} environments, one thread"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for column in ("task", "vector environment", "world (rows of TimeStep)", "single environment"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name in TASKS:
        seconds = medians(sides(cfg, name), cfg.rounds)
        steps = {"vector": cfg.steps * cfg.envs, "world": cfg.steps * cfg.envs, "single": cfg.steps}
        results[name] = {side: steps[side] / seconds[side] for side in steps}
        table.add_row(name, *(f"{rate:,.0f}" for rate in results[name].values()))
    Console(width=110).print(table)
    return results
