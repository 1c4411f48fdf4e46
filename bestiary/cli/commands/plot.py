"""bestiary plot RUNS: learning curves of one or many runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.analysis.curves import Clock, Interval, Statistic
from bestiary.cli.parse import parse
from bestiary.config.plugins import load_plugins
from bestiary.config.schema import Count
from bestiary.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Learning curves: runs that differ only in the seed become one line, labelled by what sets it apart."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run directories"""
    metric: str = "score"
    """score or success of games while training; eval: evaluations; or any column of metrics.csv"""
    x: Clock = "frames"
    aggregate: Statistic = "mean"
    """over seeds; iqm: mean of the middle half"""
    interval: Interval = "bootstrap"
    """band over seeds; bootstrap: 95% of the aggregate, range: from the lowest to the highest seed"""
    bins: Count = 60
    """equal stretches of x; a point is the mean over one"""
    smooth: Count = 1
    """mean over so many points up to each"""
    label: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=RUN[,RUN...]")] = ()
    """one line of these runs (paths, names or patterns) under this name"""
    reference: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """a dashed line"""
    title: str = ""
    out: Path = Path("plot.png")
    """the picture; the same as .svg and the numbers as .csv go beside it"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(Settings, args, "bestiary plot")
    labels = {name: [run for run in runs.split(",") if run] for name, runs in pairs("label", cfg.label)}
    references = {name: number(name, value) for name, value in pairs("reference", cfg.reference)}
    from bestiary.analysis.plot import plot

    options = {k: v for k, v in vars(cfg).items() if k not in ("label", "reference")}
    drawn = plot(**options, labels=labels, references=references)
    for note in drawn.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"written to {', '.join(map(str, drawn.files))}")
    return 0


def pairs(flag: str, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """NAME=VALUE, split at the first sign: the name of a run may contain one too."""
    found = [word.partition("=") for word in words]
    if bad := [word for word, (name, _, value) in zip(words, found, strict=True) if not (name and value)]:
        raise UserError(f"--{flag} {bad[0]!r} should look like NAME={'RUN,RUN' if flag == 'label' else 'VALUE'}")
    return [(name, value) for name, _, value in found]


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--reference {name}={text}: {text!r} is not a number") from None
