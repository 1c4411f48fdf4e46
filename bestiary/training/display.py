"""Progress of a training run for people: a live table on a terminal, plain lines in a file or pipe."""

import math
import sys
import time
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from bestiary.config.schema import kebab
from bestiary.envs.base import References, references
from bestiary.types import Episode

if TYPE_CHECKING:
    from bestiary.config.experiment import Experiment
    from bestiary.training.run import Run


class TrainingStatus(NamedTuple):
    """The state of a training run that a display shows."""

    frames: int
    steps: int
    updates: int
    episodes: int
    seconds: float
    recent_scores: list[float]  # of the last 100 episodes
    metrics: dict[str, float]


class Display:
    """The interface of all displays. Its methods do nothing, so that a display implements only what it shows."""

    def start(self, experiment: "Experiment", run: "Run", frames: int) -> None: ...
    def update(self, status: TrainingStatus) -> None: ...

    def activity(self, text: str) -> None:
        """Show what the session does at the moment."""
        ...

    def info(self, text: str) -> None:
        """Show a message that stays visible."""
        ...

    def warning(self, text: str) -> None: ...
    def evaluation(self, frames: int, episodes: list[Episode]) -> None: ...

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


class NullDisplay(Display):
    """Shows nothing."""


def count(n: float) -> str:
    """1234567 -> 1.23M"""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if n >= limit:
            return f"{n / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{n:.0f}"


def duration(seconds: float) -> str:
    """4210.5 -> 1:10:10"""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def score_text(recent: list[float]) -> str:
    """Mean and standard deviation of the latest scores of training."""
    if not recent:
        return "-"
    return f"{np.mean(recent):.2f} ± {np.std(recent):.2f} (last {len(recent)} episodes)"


def evaluation_text(episodes: list[Episode], known: References | None) -> str:
    """Mean and standard deviation of an evaluation's scores, the success rate, and reference scores."""
    scores = [e.score for e in episodes]
    successes = [e.success for e in episodes if e.success is not None]
    text = f"{np.mean(scores):.2f} ± {np.std(scores):.2f} ({len(episodes)} episodes)"
    text += f", success {np.mean(successes):.2f}" if successes else ""
    return text + (f"  ({known})" if known else "")


class _SpeedDisplay(Display):
    """A display that measures frames per second over its last refreshes and estimates the remaining time."""

    every = 0.5  # seconds between refreshes

    def start(self, experiment: "Experiment", run: "Run", frames: int) -> None:
        self.budget = experiment.frames
        self.parts = " + ".join(kebab(type(p)) for p in (experiment.algo, experiment.core, experiment.env))
        self.references = references(experiment.env)
        self.run = run
        self.history = [(time.monotonic(), frames)]
        self.refreshed = 0.0
        self.metrics: dict[str, float] = {}

    def update(self, status: TrainingStatus) -> None:
        self.metrics = status.metrics or self.metrics
        now = time.monotonic()
        if now - self.refreshed < self.every and status.frames < self.budget:
            return
        self.refreshed = now
        self.history = [*self.history[-40:], (now, status.frames)]
        (then, frames) = self.history[0]
        frames_per_second = (status.frames - frames) / max(now - then, 1e-9)
        left = duration((self.budget - status.frames) / frames_per_second) if frames_per_second > 0 else "?"
        self.show(status, frames_per_second, left)

    def show(self, status: TrainingStatus, frames_per_second: float, time_left: str) -> None: ...


class PlainDisplay(_SpeedDisplay):
    """Prints one line every few seconds: for logs, pipes and batch systems."""

    every = 5.0

    def start(self, experiment: "Experiment", run: "Run", frames: int) -> None:
        super().start(experiment, run, frames)
        self.print(f"{self.parts} -> {run.path}" + (f" (continues at {count(frames)} frames)" if frames else ""))

    def show(self, status: TrainingStatus, frames_per_second: float, time_left: str) -> None:
        loss = self.metrics.get("loss", math.nan)
        self.print(
            f"{min(100, 100 * status.frames / self.budget):5.1f}%  frames {count(status.frames)}  "
            f"{count(frames_per_second)}/s  episodes {status.episodes}  score {score_text(status.recent_scores)}  "
            f"loss {loss:.4g}  lag {self.metrics.get('policy_lag', 0):.1f}  left {time_left}"
        )

    def activity(self, text: str) -> None:
        self.print(text)

    def info(self, text: str) -> None:
        self.print(text)

    def warning(self, text: str) -> None:
        self.print(f"warning: {text}")

    def evaluation(self, frames: int, episodes: list[Episode]) -> None:
        self.print(f"evaluation at {count(frames)} frames: {evaluation_text(episodes, self.references)}")

    def print(self, text: str) -> None:
        print(text, flush=True)


class Dashboard(_SpeedDisplay):
    """A table on a terminal, refreshed twice a second."""

    def __init__(self, console: Console) -> None:
        self.live = Live(console=console, refresh_per_second=4, transient=False)
        self.last_shown = (TrainingStatus(0, 0, 0, 0, 0.0, [], {}), 0.0, "?")
        self.last_activity = ""
        self.last_evaluation = "-"

    def show(self, status: TrainingStatus, frames_per_second: float, time_left: str) -> None:
        self.last_shown = (status, frames_per_second, time_left)
        title = f"{self.parts}   [dim]{self.run.path}[/dim]"
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        table.add_column(style="bold cyan", min_width=12)
        table.add_column(min_width=44)
        table.add_column(style="bold cyan", min_width=12)
        table.add_column(min_width=14)
        done = min(1.0, status.frames / self.budget)
        bar = "█" * round(24 * done) + "░" * (24 - round(24 * done))
        left = [
            ("progress", f"{bar} {100 * done:.1f}%"),
            ("frames", f"{count(status.frames)} of {count(self.budget)}  ({count(status.steps)} steps)"),
            ("speed", f"{count(frames_per_second)} frames/s"),
            ("time", f"{duration(status.seconds)} spent, {time_left} left"),
            ("updates", count(status.updates)),
            ("episodes", count(status.episodes)),
            ("score", score_text(status.recent_scores)),
            ("evaluation", self.last_evaluation),
            ("", f"[dim]{self.last_activity}[/dim]"),
        ]
        right = [(k.replace("_", " "), f"{v:.4g}") for k, v in self.metrics.items()]
        for a, b in zip_longest(left, right, fillvalue=("", "")):
            table.add_row(*a, *b)
        self.live.update(table)

    def activity(self, text: str) -> None:
        self.last_activity = text
        self.show(*self.last_shown)

    def info(self, text: str) -> None:
        """Print above the table, where the text stays."""
        self.live.console.print(text, markup=False, soft_wrap=True)

    def warning(self, text: str) -> None:
        self.info(f"warning: {text}")

    def evaluation(self, frames: int, episodes: list[Episode]) -> None:
        self.last_evaluation = f"{evaluation_text(episodes, self.references)} at {count(frames)} frames"
        self.activity("")

    def __enter__(self) -> "Dashboard":
        self.live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.live.__exit__(kind, e, tb)


def choose_display() -> Display:
    """A dashboard on a terminal, plain lines otherwise."""
    return Dashboard(Console()) if sys.stdout.isatty() else PlainDisplay()
