"""What a person sees while it trains: a live table on a terminal, plain lines elsewhere."""

import math
import sys
import time
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


class View(NamedTuple):
    frames: int
    steps: int
    updates: int
    games: int
    seconds: float
    recent: list[float]  # scores of the last 100 games
    metrics: dict[str, float]


class NullDisplay:
    """Shows nothing; the base of those that do."""

    def start(self, experiment: "Experiment", run: "Run", frames: int) -> None: ...
    def update(self, view: View) -> None: ...
    def note(self, text: str) -> None: ...
    def tell(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def evaluated(self, frames: int, games: list[Episode]) -> None: ...

    def __enter__(self) -> "NullDisplay":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None: ...


Screen = NullDisplay


def count(n: float) -> str:
    """1234567 -> 1.23M"""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if n >= limit:
            return f"{n / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{n:.0f}"


def duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def score(recent: list[float]) -> str:
    if not recent:
        return "-"
    return f"{np.mean(recent):.2f} ± {np.std(recent):.2f} (last {len(recent)} games)"


def spread(games: list[Episode], known: References | None) -> str:
    """Score and success of an evaluation, and between what they lie."""
    scores = [e.score for e in games]
    successes = [e.success for e in games if e.success is not None]
    text = f"{np.mean(scores):.2f} ± {np.std(scores):.2f} ({len(games)} games)"
    text += f", success {np.mean(successes):.2f}" if successes else ""
    return text + (f"  ({known})" if known else "")


class _Pace(NullDisplay):
    """Frames per second over the last few updates, and the time left at that pace."""

    every = 0.5  # seconds between refreshes

    def start(self, experiment: "Experiment", run: "Run", frames: int) -> None:
        self.budget = experiment.frames
        self.parts = " + ".join(kebab(type(p)) for p in (experiment.algo, experiment.core, experiment.env))
        self.references = references(experiment.env)
        self.run = run
        self.marks = [(time.monotonic(), frames)]
        self.shown = 0.0
        self.metrics: dict[str, float] = {}

    def update(self, view: View) -> None:
        self.metrics = view.metrics or self.metrics
        now = time.monotonic()
        if now - self.shown < self.every and view.frames < self.budget:
            return
        self.shown = now
        self.marks = [*self.marks[-40:], (now, view.frames)]
        (then, before) = self.marks[0]
        lr_schedule = (view.frames - before) / max(now - then, 1e-9)
        left = duration((self.budget - view.frames) / lr_schedule) if lr_schedule > 0 else "?"
        self.show(view, lr_schedule, left)

    def show(self, view: View, lr_schedule: float, left: str) -> None: ...


class Lines(_Pace):
    """One line every few seconds: for logs, pipes and batch systems."""

    every = 5.0

    def start(self, experiment: "Experiment", run: "Run", frames: int) -> None:
        super().start(experiment, run, frames)
        self.say(f"{self.parts} -> {run.path}" + (f" (continues at {count(frames)} frames)" if frames else ""))

    def show(self, view: View, lr_schedule: float, left: str) -> None:
        loss = self.metrics.get("loss", math.nan)
        self.say(
            f"{min(100, 100 * view.frames / self.budget):5.1f}%  frames {count(view.frames)}  {count(lr_schedule)}/s  "
            f"games {view.games}  score {score(view.recent)}  loss {loss:.4g}  "
            f"lag {self.metrics.get('policy_lag', 0):.1f}  left {left}"
        )

    def note(self, text: str) -> None:
        self.say(text)

    def tell(self, text: str) -> None:
        self.say(text)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def evaluated(self, frames: int, games: list[Episode]) -> None:
        self.say(f"evaluation at {count(frames)} frames: {spread(games, self.references)}")

    def say(self, text: str) -> None:
        print(text, flush=True)


class Dashboard(_Pace):
    """One screen, refreshed twice a second."""

    def __init__(self, console: Console) -> None:
        self.live = Live(console=console, refresh_per_second=4, transient=False)
        self.shown_last = (View(0, 0, 0, 0, 0.0, [], {}), 0.0, "?")
        self.last_note = ""
        self.last_evaluation = "-"

    def show(self, view: View, lr_schedule: float, left: str) -> None:
        self.shown_last = (view, lr_schedule, left)
        title = f"{self.parts}   [dim]{self.run.path}[/dim]"
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        table.add_column(style="bold cyan", min_width=12)
        table.add_column(min_width=44)
        table.add_column(style="bold cyan", min_width=12)
        table.add_column(min_width=14)
        share = min(1.0, view.frames / self.budget)
        bar = "█" * round(24 * share) + "░" * (24 - round(24 * share))
        learner = [(k.replace("_", " "), f"{v:.4g}") for k, v in self.metrics.items()]
        rows = [
            ("progress", f"{bar} {100 * share:.1f}%"),
            ("frames", f"{count(view.frames)} of {count(self.budget)}  ({count(view.steps)} steps)"),
            ("speed", f"{count(lr_schedule)} frames/s"),
            ("time", f"{duration(view.seconds)} spent, {left} left"),
            ("updates", count(view.updates)),
            ("games", count(view.games)),
            ("score", score(view.recent)),
            ("evaluation", self.last_evaluation),
            ("", f"[dim]{self.last_note}[/dim]"),
        ]
        for i in range(max(len(rows), len(learner))):
            left_pair = rows[i] if i < len(rows) else ("", "")
            table.add_row(*left_pair, *(learner[i] if i < len(learner) else ("", "")))
        self.live.update(table)

    def note(self, text: str) -> None:
        self.last_note = text
        self.show(*self.shown_last)

    def tell(self, text: str) -> None:
        """Above the screen, where it stays."""
        self.live.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.tell(f"warning: {text}")

    def evaluated(self, frames: int, games: list[Episode]) -> None:
        self.last_evaluation = f"{spread(games, self.references)} at {count(frames)} frames"
        self.note("")

    def __enter__(self) -> "Dashboard":
        self.live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.live.__exit__(kind, e, tb)


def choose_screen() -> Screen:
    return Dashboard(Console()) if sys.stdout.isatty() else Lines()
