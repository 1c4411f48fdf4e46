"""Speed of the IMPALA training loop against the sum of its parts: emulator, acting, learning."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bestiary.algos.impala import ImpalaLearner
from bestiary.bench import medians
from bestiary.envs.atari import AtariEnvBatch
from bestiary.nets import Resnet, Shallow
from bestiary.presets import preset
from bestiary.replay import Fifo
from bestiary.runtime.local import LocalRuntime
from bestiary.runtime.start import start
from bestiary.types import Batch


@dataclass(frozen=True)
class ImpalaAtari:
    """bestiary bench impala-atari"""

    net: Literal["both", "shallow", "resnet"] = "both"
    """encoder"""
    unroll: int = 20
    """unroll length T in agent steps"""
    envs: int = 32
    """number of environments, which is also the batch size in trajectories"""
    game: str = "Pong"
    """name of the Atari game"""
    rounds: int = 9
    """timings per part; medians are reported"""
    threads: int | None = None
    """CPU threads; None: all cores"""


def measure(cfg: ImpalaAtari, net: str) -> dict[str, float]:
    """Agent steps per second of each part and of the loop, with its fraction of the ideal rate."""
    base = preset("impala-shallow")
    encoder = Resnet() if net == "resnet" else Shallow()
    experiment = replace(
        base,
        env=replace(base.env, game=cfg.game),
        net=replace(base.net, encoder=encoder),
        algo=replace(base.algo, replay=Fifo(cfg.envs), unroll=cfg.unroll),
        runtime=replace(base.runtime, envs=cfg.envs, threads=cfg.threads),
    )
    runtime = start(experiment)
    assert isinstance(runtime, LocalRuntime)
    loop = iter(runtime)
    next(loop)
    env_batch, actor, learner = runtime.env_batch, runtime.actor, runtime.learner
    assert isinstance(env_batch, AtariEnvBatch)
    assert isinstance(learner, ImpalaLearner)
    rng = np.random.default_rng(0)
    trajectory, _ = actor.unroll()
    step = actor.current[0] if actor.current else trajectory.step
    batch = Batch(trajectory)

    def emulate() -> None:
        for _ in range(cfg.unroll):
            env_batch.env.step(rng.integers(0, env_batch.spec.num_actions, cfg.envs))

    explore = torch.zeros(cfg.envs)

    @torch.no_grad()
    def act() -> None:
        for _ in range(cfg.unroll):
            actor.agent.act(step, actor.state, explore, actor.rng)

    def learn() -> None:
        learner.agent.zero_grad(set_to_none=True)
        loss, _ = learner.loss(batch.trajectory)
        loss.backward()

    seconds = medians({"emulator": emulate, "acting": act, "learning": learn, "loop": lambda: next(loop)}, cfg.rounds)
    runtime.close()
    steps = cfg.unroll * cfg.envs
    parts = seconds["emulator"] + seconds["acting"] + seconds["learning"]
    rates = {name: steps / s for name, s in seconds.items()}
    return rates | {"ideal": steps / parts, "share": parts / seconds["loop"]}


def main(cfg: ImpalaAtari) -> dict[str, Any]:
    nets = ("shallow", "resnet") if cfg.net == "both" else (cfg.net,)
    results = {net: measure(cfg, net) for net in nets}
    setting = f"T={cfg.unroll}, {cfg.envs} environments, {torch.get_num_threads()} threads"
    title = f"IMPALA on {cfg.game}: agent steps/s, {setting}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for column in ("network", "emulator", "acting", "learning", "ideal", "loop", "share of ideal"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for net, r in results.items():
        numbers = [f"{r[k]:,.0f}" for k in ("emulator", "acting", "learning", "ideal", "loop")]
        table.add_row(net, *numbers, f"{100 * r['share']:.0f}%")
    Console(width=110).print(table)
    return results
