"""Logs of a run: CSV files, with TensorBoard and Weights & Biases as optional copies. A resumed run continues them."""

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
    """A CSV file with a fixed set of columns. Without `keep_frames` it begins anew; with it, later rows are dropped."""

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
        # the columns of the first row stay, although a run that is resumed with another runtime may offer others
        csv.DictWriter(self.file, self.columns, restval="", extrasaction="ignore").writerow(row)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _frames(row: dict[str, str]) -> float:
    try:
        return int(row["frames"])
    except (KeyError, TypeError, ValueError):
        return math.inf  # a row cut short by a crash


EPISODE_COLUMNS = ["frames", "slot", "score", "steps", "episode_frames", "lives", "life_returns", "truncated"]
EPISODE_COLUMNS += ["success", "components"]  # components: reward components of the episode, as name=value|...


class Recorder:
    """Writes the metrics, episodes, evaluations and events of one run."""

    def __init__(self, path: Path, cfg: Logs, frames: int | None, settings: dict[str, Any]) -> None:
        """`frames`: where a resumed run continues; None: a new run."""
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

            # the directory of one seed of many is named after the seed alone
            name = f"{path.parent.name}-{path.name}" if path.name.startswith("seed") else path.name
            self.wandb = wandb.init(
                project=cfg.wandb_project, id=name, name=name, resume="allow", config=settings, dir=str(path)
            )
            self.wandb.define_metric("*", step_metric="frames")

    def row(self, frames: int, values: dict[str, float]) -> None:
        self.metrics.write({"frames": frames, **{k: _short(v) for k, v in values.items()}})
        self._copy(frames, "train", values)

    def episode(self, frames: int, e: Episode) -> None:
        lives = "|".join(f"{x:g}" for x in e.life_returns)
        success = "" if e.success is None else int(e.success)
        components = "|".join(f"{name}={_short(value)}" for name, value in e.components.items())
        row = (frames, e.slot, repr(e.score), e.steps, e.frames, len(e.life_returns), lives, int(e.truncated), success)
        self.episodes.write(dict(zip(EPISODE_COLUMNS, (*row, components), strict=True)))

    def event(self, frames: int, text: str) -> None:
        """Append a line with date and frames to events.txt. A resume keeps all lines."""
        with (self.path / "events.txt").open("a") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')}  {frames} frames  {text}\n")

    def evaluation(self, frames: int, values: dict[str, float]) -> None:
        self.evaluations.write({"frames": frames, **{k: _short(v) for k, v in values.items()}})
        self._copy(frames, "eval", values)

    def _copy(self, frames: int, group: str, values: dict[str, float]) -> None:
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
    """Nine digits, which hold a float32 exactly; empty for NaN."""
    return "" if isinstance(value, float) and math.isnan(value) else f"{value:.9g}"
