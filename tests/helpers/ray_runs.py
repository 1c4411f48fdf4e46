"""Small runs of the Ray runtime and their tables."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import bestiary
from bestiary.algos import Impala
from bestiary.config.experiment import Experiment
from bestiary.runtime import Ray
from helpers.settings import configure


def tiny(name: str, frames: int, **runtime: Any) -> Experiment:
    """A small version of a preset."""
    e = bestiary.preset(name)
    small = {"batch_size": 8} if isinstance(e.algo, Impala) else {}
    return replace(
        e,
        frames=frames,
        algo=configure(e.algo, **small),
        runtime=Ray(**{"envs": 8, "threads": 1, "timeout": 60.0, **runtime}),
        log=replace(e.log, every=min(2_000, max(1, frames // 10)), tensorboard=False),
        evaluation=replace(e.evaluation, every=None, episodes=0, command=()),
    )


def table(run: Path, name: str) -> list[dict[str, str]]:
    with (run / name).open() as file:
        return list(csv.DictReader(file))
