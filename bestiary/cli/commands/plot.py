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
class PlotCommand:
    """Learning curves. Runs that differ only in the seed are one line, labelled by the settings that distinguish it."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run directories, or directories of seeds, each of which stands for all of its runs"""
    metric: str = "score"
    """score or success of training episodes; eval or eval.COLUMN of evaluations; or any column of metrics.csv"""
    x: Clock = "frames"
    """x axis: environment frames, agent steps, seconds of training or updates"""
    aggregate: Statistic = "mean"
    """statistic over seeds; iqm: interquartile mean, the mean of the middle half (Agarwal et al. 2021)"""
    interval: Interval = "bootstrap"
    """band around a line; bootstrap: stratified bootstrap 95% interval; range: lowest to highest seed"""
    bins: Count = 60
    """number of bins of equal width on the x axis; each point is the mean over one bin"""
    smooth: Count = 1
    """window of the trailing moving average, in points; 1: none"""
    label: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=RUN[,RUN...]")] = ()
    """one line with this name for these runs (paths, names or patterns); may be repeated"""
    reference: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """a dashed horizontal line with this name, such as human=7127.7; may be repeated"""
    title: str = ""
    """title above the figure"""
    out: Path = Path("plot.png")
    """file of the figure, .png or .svg; the other format and a .csv file of its numbers are written beside it"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(PlotCommand, args, "bestiary plot")
    labels = {name: [run for run in runs.split(",") if run] for name, runs in pairs("label", cfg.label)}
    references = {name: number(name, value) for name, value in pairs("reference", cfg.reference)}
    from bestiary.analysis.plot import plot

    options = {k: v for k, v in vars(cfg).items() if k not in ("label", "reference")}
    plotted = plot(**options, labels=labels, references=references)
    for note in plotted.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"written to {', '.join(map(str, plotted.files))}")
    return 0


def pairs(flag: str, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """NAME=VALUE, split at the first equals sign, because paths of runs may contain more."""
    found = [word.partition("=") for word in words]
    if wrong := [word for word, (name, _, value) in zip(words, found, strict=True) if not (name and value)]:
        raise UserError(f"--{flag} {wrong[0]!r} should look like NAME={'RUN,RUN' if flag == 'label' else 'VALUE'}")
    return [(name, value) for name, _, value in found]


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--reference {name}={text}: {text!r} is not a number") from None
