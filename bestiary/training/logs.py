"""Numbers on disk: CSV is the truth, TensorBoard and wandb are views of it. Curves continue across resumes."""

import csv
import math
import os
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from bestiary.config.aliases import upgrade_metric
from bestiary.config.experiment import Logs
from bestiary.types import Episode


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a run's CSV file, also of one that an earlier version wrote under other column names.

    Rows that a crash cut short are left out; a file that does not exist has no columns.
    """
    if not path.exists():
        return [], []
    with path.open(newline="") as file:
        reader = csv.reader(file)
        columns = [upgrade_metric(name) for name in next(reader, [])]
        return columns, [row for row in reader if len(row) == len(columns)]


class Table:
    """A CSV file with one fixed set of columns. Continuing it drops the rows beyond a frame count."""

    def __init__(self, path: Path, columns: list[str] | None = None, keep_frames: int | None = None) -> None:
        self.path = path
        rows: list[dict[str, str]] = []
        if path.exists() and keep_frames is not None:
            found, lines = read_table(path)
            rows = [row for line in lines if _frames(row := dict(zip(found, line, strict=True))) <= keep_frames]
            columns = found or columns
        self.columns = columns
        aside = path.with_suffix(".writing")
        with aside.open("w", newline="") as file:
            if columns:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)
        os.replace(aside, path)
        self.file = path.open("a", newline="")

    def write(self, row: dict[str, Any]) -> None:
        if self.columns is None:
            self.columns = list(row)
            csv.DictWriter(self.file, self.columns).writeheader()
        # the columns of the first row stay: a run continued elsewhere may have others to offer
        csv.DictWriter(self.file, self.columns, restval="", extrasaction="ignore").writerow(row)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _frames(row: dict[str, str]) -> float:
    try:
        return int(row["frames"])
    except (KeyError, TypeError, ValueError):
        return math.inf  # a row cut short by a crash


EPISODE_COLUMNS = ["frames", "slot", "score", "steps", "game_frames", "lives", "life_returns", "truncated", "success"]
EPISODE_COLUMNS += ["components"]  # of the whole game: name=value|...


class Recorder:
    """Writes metrics, episodes and evaluations of one run."""

    def __init__(self, path: Path, cfg: Logs, frames: int | None, settings: dict[str, Any]) -> None:
        """`frames` is where a resumed run continues; None starts anew."""
        self.path = path
        self.metrics = Table(path / "metrics.csv", keep_frames=frames)
        self.episodes = Table(path / "episodes.csv", EPISODE_COLUMNS, keep_frames=frames)
        self.evaluations = Table(path / "evaluations.csv", keep_frames=frames)
        self.tensorboard = self.wandb = None
        if cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if frames is None else frames + 1
            self.tensorboard = SummaryWriter(str(path / "tensorboard"), purge_step=purge)
        if cfg.wandb:
            import wandb  # type: ignore[import-not-found]

            # one of many seeds is known by the directory around it
            name = f"{path.parent.name}-{path.name}" if path.name.startswith("seed") else path.name
            self.wandb = wandb.init(
                project=cfg.wandb_project, id=name, name=name, resume="allow", config=settings, dir=str(path)
            )
            self.wandb.define_metric("*", step_metric="frames")

    def row(self, frames: int, values: dict[str, float]) -> None:
        self.metrics.write({"frames": frames, **{k: _short(v) for k, v in values.items()}})
        self._views(frames, "train", values)

    def episode(self, frames: int, e: Episode) -> None:
        lives = "|".join(f"{x:g}" for x in e.lives)
        success = "" if e.success is None else int(e.success)
        parts = "|".join(f"{name}={_short(value)}" for name, value in e.components.items())
        row = (frames, e.slot, repr(e.score), e.steps, e.frames, len(e.lives), lives, int(e.truncated), success, parts)
        self.episodes.write(dict(zip(EPISODE_COLUMNS, row, strict=True)))

    def event(self, frames: int, text: str) -> None:
        """What happened that is not a number: kept with its time, also beyond a resume."""
        with (self.path / "events.txt").open("a") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')}  {frames} frames  {text}\n")

    def evaluation(self, frames: int, values: dict[str, float]) -> None:
        self.evaluations.write({"frames": frames, **{k: _short(v) for k, v in values.items()}})
        self._views(frames, "eval", values)

    def _views(self, frames: int, group: str, values: dict[str, float]) -> None:
        finite = {k: v for k, v in values.items() if math.isfinite(v)}
        if self.tensorboard is not None:
            for name, value in finite.items():
                self.tensorboard.add_scalar(f"{group}/{name}", value, frames)
        if self.wandb is not None:
            self.wandb.log({"frames": frames, **{f"{group}/{k}": v for k, v in finite.items()}})

    def close(self) -> None:
        for table in (self.metrics, self.episodes, self.evaluations):
            table.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _short(value: float) -> str:
    """Nine digits hold a float32 exactly; nothing where there is nothing to say."""
    return "" if isinstance(value, float) and math.isnan(value) else f"{value:.9g}"
