"""`bestiary bench cluster`: throughput of the Ray runtime and of one process on the same cores, and its costs."""

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
from bestiary.replay import Fifo
from bestiary.runtime import Local, Overlap, Ray
from bestiary.runtime.local import LocalRuntime
from bestiary.runtime.start import start
from bestiary.types import Batch, Progress


@dataclass(frozen=True)
class ClusterBench:
    """bestiary bench cluster"""

    game: str = "Pong"
    """Atari game"""
    envs: int = 32
    """environments in total, and trajectories per update"""
    unroll: int = 20
    """T: steps of each environment in a trajectory"""
    actors: tuple[int, ...] = (1, 2)
    """numbers of actors, which divide the environments among them"""
    points: tuple[int, ...] = (1, 2, 4)
    """numbers of actors with `envs` environments each, to check `bestiary bench scaling` against"""
    shared: bool = True
    """measure shared inference too"""
    rounds: int = 5
    """number of measurements of each runtime, in turn; their median is reported"""
    seconds: float = 8.0
    """duration of a measurement, in seconds"""


def atari(cfg: ClusterBench, runtime: Local | Overlap | Ray) -> Experiment:
    """The experiment that is measured: IMPALA with the shallow network."""
    base = preset("impala-shallow")
    return replace(
        base,
        env=replace(base.env, game=cfg.game),
        algo=replace(base.algo, unroll=cfg.unroll, replay=Fifo(cfg.envs, 2 * cfg.envs)),
        runtime=runtime,
        frames=10**9,
    )


def runtimes(cfg: ClusterBench) -> dict[str, Local | Overlap | Ray]:
    """The runtimes to compare, with the same environments on the same cores."""
    found: dict[str, Local | Overlap | Ray] = {
        "one process": Local(envs=cfg.envs),
        "one process, two threads": Overlap(envs=cfg.envs),
    }
    for actors in cfg.actors:
        cpus = max(0.1, (cores() - 1) / actors)
        common = Ray(actors=actors, envs=cfg.envs // actors, actor_cpus=cpus, threads=None)
        name = f"Ray, {actors} actor{'s' * (actors > 1)}"
        found[name] = common
        if cfg.shared:
            cpus = max(0.1, (cores() - 1) / (actors + 1))
            found[f"{name}, shared inference"] = replace(
                common, inference="shared", actor_cpus=cpus, min_batch=cfg.envs
            )
    return found


def steps_per_second(loop: Iterator[Progress], seconds: float) -> tuple[float, dict[str, float]]:
    """Agent steps per second during so many seconds, and the last metrics."""
    first = next(loop)
    started, metrics = time.perf_counter(), {}
    while True:
        progress = next(loop)
        metrics = progress.metrics or metrics
        passed = time.perf_counter() - started
        if passed >= seconds:
            return (progress.steps - first.steps) / passed, metrics


def time_parts(cfg: ClusterBench) -> dict[str, float]:
    """Seconds of an unroll, an update and each transfer between them, measured while nothing else runs."""
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

        def transfer() -> None:
            unpack(ray.get(ray.put(packed)))

        seconds = medians(
            {
                "actor_seconds": runtime.actor.unroll,
                "update_seconds": lambda: learner.update(batch),
                "pack_seconds": lambda: pack(trajectory),
                "transfer_seconds": transfer,
                "weights_seconds": lambda: codec.decode(ray.get(ray.put(weights))),
            },
            3 * cfg.rounds,
        )
        sizes = {"trajectory_bytes": float(tree.size(trajectory)), "weights_bytes": float(weights.nbytes)}
    return seconds | sizes


def main(cfg: ClusterBench) -> dict[str, Any]:
    """Measure the runtimes in turn, those of Ray in a new cluster each time, and compare their medians."""
    from bestiary.config.extras import require
    from bestiary.runtime.ray.cluster import connect, disconnect

    require("ray", "ray")
    connect(None, 2**28)
    try:
        parts = time_parts(cfg)
    finally:
        disconnect()
    chosen = runtimes(cfg)
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    metrics: dict[str, dict[str, float]] = {}
    for _ in range(cfg.rounds):
        for name, runtime in chosen.items():
            experiment = atari(cfg, runtime)
            with closing(start(experiment)) as running:
                loop = iter(running)
                next(loop)
                speed, metrics[name] = steps_per_second(loop, cfg.seconds)
                speeds[name].append(speed)
            torch.set_num_threads(cores())
    found = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(found[name] for name in list(found)[:2])
    table = Table(
        title=f"IMPALA on {cfg.game}, agent steps/s, {cfg.envs} environments, T={cfg.unroll}, {cores()} cores",
        title_justify="left",
        box=None,
    )
    for column in ("runtime", "steps/s", "spread", "of the best without Ray", "lag", "learner idle"):
        table.add_column(column, justify="left" if column == "runtime" else "right")
    for name, speed in found.items():
        spread = f"{min(speeds[name]):,.0f} to {max(speeds[name]):,.0f}"
        idle = metrics[name].get("learner_idle")
        lag = metrics[name].get("policy_lag", 0.0)
        table.add_row(
            name, f"{speed:,.0f}", spread, f"{100 * speed / best:.0f}%", f"{lag:.1f}",
            "" if idle is None else f"{100 * idle:.0f}%",
        )  # fmt: skip
    Console(width=120).print(table)
    costs = Table(title="milliseconds of each part alone, one thread", title_justify="left", box=None)
    for column in ("part", "ms"):
        costs.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in parts.items():
        if name.endswith("_seconds"):
            costs.add_row(name.removesuffix("_seconds"), f"{1000 * seconds:.1f}")
    Console(width=110).print(costs)
    return {
        "steps_per_second": found,
        "spread": speeds,
        "metrics": metrics,
        "parts": parts,
        "measured": measured(cfg, parts),
        "points": [{"actors": n, "frames_per_second": 4 * throughput(cfg, n)} for n in cfg.points],
        "settings": asdict(cfg),
    }


def throughput(cfg: ClusterBench, actors: int) -> float:
    """Agent steps per second with a number of actors that have `envs` environments each."""
    runtime = Ray(actors=actors, envs=cfg.envs, actor_cpus=max(0.1, (cores() - 1) / actors))
    with closing(start(atari(cfg, runtime))) as running:
        loop = iter(running)
        next(loop)
        return steps_per_second(loop, 2 * cfg.seconds)[0]


def measured(cfg: ClusterBench, parts: dict[str, float]) -> dict[str, Any]:
    """The input of `bestiary bench scaling`, for actors with `envs` environments each."""
    return {
        "envs": cfg.envs,
        "unroll": cfg.unroll,
        "frames_per_step": 4,
        "batch_transitions": cfg.envs * cfg.unroll,
        "cores": cores(),
        "actor_seconds": parts["actor_seconds"] + parts["pack_seconds"],
        "trajectory_bytes": parts["trajectory_bytes"],
        "weights_bytes": parts["weights_bytes"],
        "add_seconds": parts["transfer_seconds"],
        "sample_seconds": parts["transfer_seconds"],
        "update_seconds": parts["update_seconds"],
    }
