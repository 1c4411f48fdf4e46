"""A small experiment, and what tests compare between two runs of it."""

import csv
from dataclasses import replace
from pathlib import Path

import torch

import bestiary
from bestiary.config.experiment import Evaluation, Experiment, Logs
from bestiary.cores import Lstm
from bestiary.envs import Recall
from bestiary.presets import preset
from bestiary.runtime import Local
from bestiary.training.display import NullDisplay
from bestiary.training.run import Run
from bestiary.training.session import Session
from helpers.settings import configure


def tiny(env=None, **changes) -> Experiment:
    base = replace(
        preset("recall"),
        env=env or Recall(delay=3),
        algo=configure(preset("recall").algo, unroll=7, batch_size=4),
        core=Lstm(hidden=8),
        runtime=Local(envs=6, threads=1),
        frames=3_000,
        evaluation=Evaluation(episodes=0),
        log=Logs(every=200, tensorboard=False),
    )
    return replace(base, **changes)


def rows(
    run: Run, name: str = "metrics.csv", without=("seconds", "frames_per_second", "updates_per_second")
) -> list[dict]:
    with (run.path / name).open() as file:
        return [{k: v for k, v in row.items() if k not in without} for row in csv.DictReader(file)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.load().weights


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def interrupted(experiment: Experiment, path: Path, frames: int) -> Run:
    """Train until `frames`, stop as Ctrl-C does, and train on."""
    session = None

    def enough() -> bool:
        return session is not None and session.runtime.frames >= frames

    session = Session(experiment, path, NullDisplay(), enough)
    for _ in session:
        pass
    assert not session.finished
    return bestiary.train(experiment, path)
