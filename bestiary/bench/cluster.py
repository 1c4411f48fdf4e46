"""What a cluster costs: the same experiment on the same cores, by Ray and in one process, and where the time goes."""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bestiary import tree
from bestiary.bench import medians
from bestiary.config.experiment import Experiment
from bestiary.config.machine import cores
from bestiary.presets import preset
from bestiary.runtime import Local, Overlap, Ray
from bestiary.runtime.local import LocalRuntime
from bestiary.runtime.start import start
from bestiary.types import Batch, Progress


@dataclass(frozen=True)
class Settings:
    """bestiary bench cluster"""

    game: str = "Pong"
    envs: int = 32
    """environments in all, and trajectories per update"""
    unroll: int = 20
    """T"""
    actors: tuple[int, ...] = (1, 2)
    """how many share the environments; each number is measured"""
    points: tuple[int, ...] = (1, 2, 4)
    """actors with all the environments each, for `bestiary bench scaling` to be held to"""
    shared: bool = True
    """measure inference shared by all actors too"""
    rounds: int = 5
    """turns of each side"""
    seconds: float = 8.0
    """of a turn"""


def atari(cfg: Settings, runtime: Local | Overlap | Ray) -> Experiment:
    base = preset("impala-shallow")
    return replace(
        base,
        env=replace(base.env, game=cfg.game),
        algo=replace(base.algo, unroll=cfg.unroll, batch_size=cfg.envs, queue=2 * cfg.envs),
        runtime=runtime,
        frames=10**9,
    )


def sides(cfg: Settings) -> dict[str, Local | Overlap | Ray]:
    """The same environments on the same cores."""
    found: dict[str, Local | Overlap | Ray] = {
        "one process": Local(envs=cfg.envs),
        "one process, two threads": Overlap(envs=cfg.envs),
    }
    for many in cfg.actors:
        cpus = max(0.1, (cores() - 1) / many)
        common = Ray(actors=many, envs=cfg.envs // many, actor_cpus=cpus, threads=None)
        found[f"Ray, {many} actor{'s' * (many > 1)}"] = common
        if cfg.shared:
            share = max(0.1, (cores() - 1) / (many + 1))
            found[f"Ray, {many}, inference shared"] = replace(
                common, inference="shared", actor_cpus=share, min_batch=cfg.envs
            )
    return found


def steps_per_second(loop: Iterator[Progress], seconds: float) -> tuple[float, dict[str, float]]:
    """Agent steps a second until so much time has passed, and what was told last."""
    first = next(loop)
    started, told = time.perf_counter(), {}
    while True:
        progress = next(loop)
        told = progress.metrics or told
        passed = time.perf_counter() - started
        if passed >= seconds:
            return (progress.steps - first.steps) / passed, told


def parts(cfg: Settings) -> dict[str, float]:
    """Seconds of each part alone, with nothing else running: an unroll, an update, and what the way between costs."""
    import ray

    from bestiary.runtime.ray.wire import WeightsCodec, pack, unpack

    with closing(LocalRuntime(atari(cfg, Local(envs=cfg.envs, threads=1)))) as runtime:
        next(iter(runtime))
        trajectory, _ = runtime.actor.unroll()
        packed, learner = pack(trajectory), runtime.learner
        codec = WeightsCodec(learner.agent.state_dict())
        weights = codec.encode(learner.agent.state_dict())
        batch = Batch(trajectory)
        learner.update(batch)

        def travel() -> None:
            unpack(ray.get(ray.put(packed)))

        measured = medians(
            {
                "actor_seconds": runtime.actor.unroll,
                "update_seconds": lambda: learner.update(batch),
                "pack_seconds": lambda: pack(trajectory),
                "travel_seconds": travel,
                "weights_seconds": lambda: codec.decode(ray.get(ray.put(weights))),
            },
            3 * cfg.rounds,
        )
        sizes = {"trajectory_bytes": float(tree.size(trajectory)), "weights_bytes": float(weights.nbytes)}
    return measured | sizes


def main(cfg: Settings) -> dict[str, Any]:
    """Sides are measured in turn, each in a cluster of its own, and compared by their medians."""
    from bestiary.config.extras import require
    from bestiary.runtime.ray.cluster import connect, disconnect

    require("ray", "ray")
    connect(None, 2**28)
    try:
        alone = parts(cfg)
    finally:
        disconnect()
    chosen = sides(cfg)
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    told: dict[str, dict[str, float]] = {}
    for _ in range(cfg.rounds):
        for name, runtime in chosen.items():
            experiment = atari(cfg, runtime)
            with closing(start(experiment)) as running:
                loop = iter(running)
                next(loop)
                speed, told[name] = steps_per_second(loop, cfg.seconds)
                speeds[name].append(speed)
            torch.set_num_threads(cores())
    found = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(found[name] for name in list(found)[:2])
    table = Table(
        title=f"IMPALA on {cfg.game}, agent steps/s, {cfg.envs} environments, T={cfg.unroll}, {cores()} cores",
        title_justify="left",
        box=None,
    )
    for column in ("runtime", "steps/s", "spread", "of the better one without Ray", "lag", "learner idle"):
        table.add_column(column, justify="left" if column == "runtime" else "right")
    for name, speed in found.items():
        spread = f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}"
        idle = told[name].get("learner_idle")
        lag = told[name].get("policy_lag", 0.0)
        table.add_row(
            name, f"{speed:,.0f}", spread, f"{100 * speed / best:.0f}%", f"{lag:.1f}",
            "" if idle is None else f"{100 * idle:.0f}%",
        )  # fmt: skip
    Console(width=120).print(table)
    spent = Table(title="milliseconds of the parts alone, one thread", title_justify="left", box=None)
    for column in ("part", "ms"):
        spent.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in alone.items():
        if name.endswith("_seconds"):
            spent.add_row(name.removesuffix("_seconds"), f"{1000 * seconds:.1f}")
    Console(width=110).print(spent)
    return {
        "steps_per_second": found,
        "spread": speeds,
        "told": told,
        "parts": alone,
        "measured": measured(cfg, alone),
        "points": [{"actors": many, "frames_per_second": 4 * point(cfg, many)} for many in cfg.points],
        "settings": asdict(cfg),
    }


def point(cfg: Settings, many: int) -> float:
    """Agent steps a second of so many actors with all the environments each."""
    runtime = Ray(actors=many, envs=cfg.envs, actor_cpus=max(0.1, (cores() - 1) / many))
    with closing(start(atari(cfg, runtime))) as running:
        loop = iter(running)
        next(loop)
        return steps_per_second(loop, 2 * cfg.seconds)[0]


def measured(cfg: Settings, alone: dict[str, float]) -> dict[str, Any]:
    """What the model of larger clusters needs (`bestiary bench scaling`): for actors with all the environments each."""
    return {
        "envs": cfg.envs,
        "unroll": cfg.unroll,
        "frames_per_move": 4,
        "batch_moves": cfg.envs * cfg.unroll,
        "cores": cores(),
        "actor_seconds": alone["actor_seconds"] + alone["pack_seconds"],
        "trajectory_bytes": alone["trajectory_bytes"],
        "weights_bytes": alone["weights_bytes"],
        "add_seconds": alone["travel_seconds"],
        "sample_seconds": alone["travel_seconds"],
        "update_seconds": alone["update_seconds"],
    }
