"""Speed of Riverraid backends: ours in one or several processes and envpool (with RAM), ale-py (without)."""

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

NUM_ACTIONS = 18


@dataclass(frozen=True)
class RiverraidBench:
    """bestiary bench riverraid"""

    envs: int = 32
    """parallel environments"""
    steps: int = 50
    """vector steps per round"""
    rounds: int = 9
    """rounds per backend; the median is reported"""
    threads: int | None = None
    """threads of envpool and ale-py, and processes of ours; None: one per core"""


def backends(cfg: RiverraidBench) -> dict[str, Callable[[], object]]:
    """A function per backend that runs `cfg.steps` vector steps with the same random actions."""
    threads = cfg.threads or cores()
    actions = np.random.default_rng(0).integers(0, NUM_ACTIONS, (cfg.steps, cfg.envs))
    env_batches = {
        "ours, one process": Riverraid().make(cfg.envs, 0, TRAIN, 1),
        f"ours, {threads} processes": Riverraid(processes=True).make(cfg.envs, 0, TRAIN, threads),
        f"ale-py without RAM, {threads} threads": Atari("Riverraid").make(cfg.envs, 0, TRAIN, threads),
    }
    for env_batch in env_batches.values():
        env_batch.reset()

    def run(env_batch: Any) -> None:
        for action in torch.from_numpy(actions):
            env_batch.step(action)

    functions: dict[str, Callable[[], object]] = {name: lambda e=env: run(e) for name, env in env_batches.items()}
    if available("envpool"):
        functions[f"envpool, {threads} threads"] = envpool_backend(cfg, actions, threads)
    return functions


def envpool_backend(cfg: RiverraidBench, actions: Any, threads: int) -> Callable[[], object]:
    """Without episode statistics and reward components."""
    import envpool

    options = {"episodic_life": False, "reward_clip": False, "repeat_action_probability": 0.0, "stack_num": 1}
    pool = envpool.make_gymnasium("Riverraid-v5", num_envs=cfg.envs, num_threads=threads, seed=0, **options)
    pool.reset()

    def run() -> None:
        for action in actions.astype(np.int32):
            assert "ram" in pool.step(action)[4]

    return run


def main(cfg: RiverraidBench) -> dict[str, Any]:
    torch.set_num_threads(1)
    seconds = medians(backends(cfg), cfg.rounds)
    rates = {name: cfg.steps * cfg.envs / value for name, value in seconds.items()}
    title = f"agent steps/s of Riverraid, random actions, {cfg.envs} environments"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    table.add_column("backend")
    table.add_column("steps/s", justify="right")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}")
    Console(width=100).print(table)
    return rates
