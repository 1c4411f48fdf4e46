"""Run directories: settings, logs and checkpoints of one run. Every command that takes a run needs nothing else."""

import json
import math
import os
import re
from datetime import datetime
from pathlib import Path

import torch

from bestiary.config.experiment import Experiment, load_experiment
from bestiary.config.versions import versions
from bestiary.errors import UserError
from bestiary.training import checkpoint
from bestiary.training.checkpoint import BadCheckpoint, Checkpoint
from bestiary.types import Snapshot

EXPERIMENT = "experiment.json"


class Run:
    """A run directory.

    experiment.json          every setting: enough to repeat the run
    versions.json            versions of Python, PyTorch and other packages
    metrics.csv              one row per logging interval, with a fixed set of columns
    episodes.csv             one row per finished episode
    evaluations.csv          one row per evaluation during training
    checkpoints/<frames>/    the latest checkpoints
    milestones/<frames>/     checkpoints that are never deleted
    best/<frames>/           weights with the best evaluation scores
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        # through a link such as runs/latest, files would go to another run as soon as the link is moved
        self.path = path.parent / path.readlink() if path.is_symlink() else path

    @staticmethod
    def create(path: Path, experiment: Experiment) -> "Run":
        """Create a run directory, or open an existing one; a directory of another experiment raises UserError."""
        run = Run(path)
        if (path / EXPERIMENT).exists():
            if different := experiment.differs_from(run.experiment()):
                raise UserError(
                    f"{path} holds another experiment ({'; '.join(different[:3])}); choose another --run, "
                    f"or continue that one with: bestiary resume {path}"
                )
        elif path.exists() and any(path.iterdir()):
            raise UserError(f"{path} is not empty and not a run; choose another --run")
        path.mkdir(parents=True, exist_ok=True)
        run.write(EXPERIMENT, experiment.to_json())
        run.write("versions.json", json.dumps(versions(), indent=2))
        run._point_latest()
        return run

    def write(self, name: str, text: str) -> None:
        """Write a file atomically: a reader sees the old contents or the new ones."""
        partial = self.path / f".{name}.writing"
        partial.write_text(text + "\n")
        partial.replace(self.path / name)

    def _point_latest(self) -> None:
        """Let runs/latest point to this run. Only a link is replaced."""
        link, new_link = self.path.parent / "latest", self.path.parent / f".latest.{os.getpid()}"
        if link.is_symlink() or not link.exists():
            new_link.symlink_to(self.path.name)
            new_link.replace(link)

    def experiment(self) -> Experiment:
        return load_experiment(self.path / EXPERIMENT)

    def saved(self, kind: str = "checkpoints") -> list[Path]:
        """Checkpoints in one of the directories checkpoints, milestones and best; the oldest first."""
        return sorted(p for p in (self.path / kind).glob("*") if re.fullmatch(r"\d+", p.name))

    def find(self, name: str | None = None) -> Path:
        """A checkpoint by name: its frames, "last" (default) or "best"."""
        trained = sorted([*self.saved("milestones"), *self.saved()], key=lambda p: p.name)
        if name in (None, "last"):
            found = trained
        elif name == "best":
            found = self._by_score()
        else:
            found = [p for p in (*self.saved("best"), *trained) if p.name == name.zfill(12)]
        if not found:
            what = "checkpoint" if name in (None, "last") else f"checkpoint {name!r}"
            known = ", ".join(dict.fromkeys(str(int(p.name)) for p in trained))
            raise BadCheckpoint(f"{self.path} has no {what}" + (f"; it has: {known}" if known else ""))
        return found[-1]

    def load(self, name: str | None = None) -> Checkpoint:
        """Load a checkpoint. One that cannot be read raises BadCheckpoint, which names the last good one."""
        path = self.find(name)
        try:
            return checkpoint.load(path)
        except BadCheckpoint as e:
            good = self._last_good(path)
            hint = "" if good is None else f"; the last good one is --checkpoint {int(good.name)}"
            raise BadCheckpoint(f"{e}{hint}") from None

    def _last_good(self, excluded: Path) -> Path | None:
        candidates = [p for p in (*self.saved(), *self.saved("milestones")) if p != excluded]
        for path in sorted(candidates, key=lambda p: p.name, reverse=True):
            try:
                checkpoint.load(path)
            except BadCheckpoint:
                continue
            return path
        return None

    def load_replay(self, name: str | None = None) -> Snapshot | None:
        """The replay buffer of a checkpoint; None if it was not saved."""
        return checkpoint.load_replay(self.find(name))

    def save(
        self,
        frames: int,
        weights: dict[str, torch.Tensor],
        trainer: Snapshot,
        keep: int,
        replay: Snapshot | None = None,
    ) -> Path:
        """Save a checkpoint and delete all but the latest `keep`. Only the latest keeps the replay buffer."""
        path = self.path / "checkpoints" / f"{frames:012d}"
        checkpoint.save(path, weights, trainer, {"frames": frames}, replay)
        self._delete(self.saved()[:-keep])
        for older in self.saved()[:-1]:
            (older / checkpoint.REPLAY).unlink(missing_ok=True)
        return path

    def has_milestone(self, milestone: int) -> bool:
        return (self.path / "milestones" / f"{milestone:012d}").exists()

    def save_milestone(self, milestone: int, frames: int, weights: dict[str, torch.Tensor], trainer: Snapshot) -> None:
        path = self.path / "milestones" / f"{milestone:012d}"
        checkpoint.save(path, weights, trainer, {"frames": frames, "milestone": milestone})

    def save_best(self, frames: int, score: float, weights: dict[str, torch.Tensor], keep: int) -> None:
        """Save weights whose evaluation score is among the `keep` best. Of equal scores the newer one ranks higher."""
        path, ranked = self.path / "best" / f"{frames:012d}", self._by_score()
        replaced = path if path in ranked else ranked[-keep] if len(ranked) >= keep else None
        if score >= (-math.inf if replaced is None else _score(replaced)):
            checkpoint.save(path, weights, {}, {"frames": frames, "score": score})
        self._delete(self._by_score()[:-keep])

    def _by_score(self) -> list[Path]:
        """The checkpoints in best/, the one with the highest score last."""
        return sorted(self.saved("best"), key=lambda p: (_score(p), p.name))

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()

    def best_score(self) -> float:
        ranked = self._by_score()
        return _score(ranked[-1]) if ranked else -math.inf


def _score(path: Path) -> float:
    """The evaluation score of a checkpoint in best/; -inf if it cannot be read."""
    try:
        return float(json.loads((path / checkpoint.META).read_text())["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf


def new_path(name: str, seed: int, root: Path = Path("runs")) -> Path:
    """A new run directory, such as runs/recall-s0-20260131-120000."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = root / f"{name}-s{seed}-{stamp}"
    return path if not path.exists() else new_path(f"{name}-{os.getpid()}", seed, root)
