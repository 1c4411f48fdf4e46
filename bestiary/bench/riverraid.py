"""How fast consoles are whose memory can be read: alone, in processes, and envpool's; and those that cannot be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bestiary.bench import medians
from bestiary.config.extras import available
from bestiary.config.machine import cores
from bestiary.envs import Atari, Riverraid
from bestiary.seeding import TRAIN

BUTTONS = 18


@dataclass(frozen=True)
class RiverraidBench:
    """bestiary bench riverraid"""

    envs: int = 32
    steps: int = 50
    """of all consoles, per round"""
    rounds: int = 9
    threads: int | None = None
    """of envpool and ale-py, and processes of ours; None: one per core"""


def sides(cfg: RiverraidBench) -> dict[str, Callable[[], object]]:
    """Random play of `cfg.steps` steps by all."""
    threads = cfg.threads or cores()
    chosen = np.random.default_rng(0).integers(0, BUTTONS, (cfg.steps, cfg.envs))
    worlds = {
        "ours, one process": Riverraid().make(cfg.envs, 0, TRAIN, 1),
        f"ours, {threads} processes": Riverraid(processes=True).make(cfg.envs, 0, TRAIN, threads),
        f"ale-py without memory, {threads} threads": Atari("Riverraid").make(cfg.envs, 0, TRAIN, threads),
    }
    for env_batch in worlds.values():
        env_batch.reset()

    def play(env_batch: Any) -> None:
        for action in torch.from_numpy(chosen):
            env_batch.step(action)

    found: dict[str, Callable[[], object]] = {name: lambda w=env_batch: play(w) for name, env_batch in worlds.items()}
    if available("envpool"):
        found[f"envpool, {threads} threads"] = envpool_side(cfg, chosen, threads)
    return found


def envpool_side(cfg: RiverraidBench, chosen: Any, threads: int) -> Callable[[], object]:
    """With nothing made of what it tells: no books, no components."""
    import envpool

    options = {"episodic_life": False, "reward_clip": False, "repeat_action_probability": 0.0, "stack_num": 1}
    pool = envpool.make_gymnasium("Riverraid-v5", num_envs=cfg.envs, num_threads=threads, seed=0, **options)
    pool.reset()

    def play() -> None:
        for action in chosen.astype(np.int32):
            assert "ram" in pool.step(action)[4]

    return play


def main(cfg: RiverraidBench) -> dict[str, Any]:
    torch.set_num_threads(1)
    seconds = medians(sides(cfg), cfg.rounds)
    rates = {name: cfg.steps * cfg.envs / value for name, value in seconds.items()}
    title = f"agent steps/s of Riverraid, random play, {cfg.envs} consoles"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    table.add_column("consoles")
    table.add_column("steps/s", justify="right")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}")
    Console(width=100).print(table)
    return rates
