"""Figures of learning curves, and the style of lines that all figures share."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bestiary.analysis.curves import Clock, Interval, Line, Statistic, curves, find_metric
from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.envs.base import references as known_references
from bestiary.errors import UserError

# The palette of Okabe and Ito, which colour-blind readers can distinguish, with wine instead of the faint yellow
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
STROKES = ("-", "-.", ":")  # line styles; dashes are for references
MARKED = 20  # lines of at most this many points have markers


class Plot(NamedTuple):
    lines: list[Line]
    notes: list[str]
    files: list[Path]


def plot(
    runs: Sequence[Path | str],
    metric: str = "score",
    x: Clock = "frames",
    aggregate: Statistic = "mean",
    interval: Interval = "bootstrap",
    bins: int = 60,
    smooth: int = 1,
    labels: Mapping[str, Sequence[str]] | None = None,
    references: Mapping[str, float] | None = None,
    title: str = "",
    out: Path | str = "plot.png",
) -> Plot:
    """Plot the learning curves of runs to OUT.png and OUT.svg, and write their numbers to OUT.csv."""
    require("matplotlib", "plot")
    from matplotlib.figure import Figure
    from matplotlib.style import context

    png, svg, table = output_files(Path(out))
    lines, notes, experiments = curves(runs, metric, x, aggregate, interval, bins, smooth, labels)
    dashed = environment_references(experiments, metric) | dict(references or {})
    # matplotlib's default style, not the user's: the same runs give the same figure everywhere
    with context(["default", {"svg.hashsalt": "bestiary"}]):
        many = len(lines) > 5
        figure = Figure(figsize=(8.4 if many else 6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        draw(axes, lines, dashed)
        axes.set_xlabel(x)
        axes.set_ylabel(find_metric(metric).name)
        axes.set_title(title, loc="left", fontsize=11)
        if many:
            figure.legend(loc="outside right center", frameon=False, fontsize=9)
        else:
            axes.legend(frameon=False, fontsize=9)
        figure.savefig(png, dpi=150, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None})
    write_table(lines, table, x, aggregate)
    return Plot(lines, notes, [png, svg, table])


def draw(
    axes: Any,
    lines: Sequence[Line],
    references: Mapping[str, float] | None = None,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Draw lines, their intervals and dashed references with names at the right; neither a title nor a legend.

    Panels of one figure pass the same `style(labels)`, so that a label looks the same in each.
    """
    from matplotlib.ticker import EngFormatter

    looks = styles or style(line.label for line in lines)
    for line in lines:
        look = looks[line.label]
        axes.plot(line.x, line.y, label=line.label, marker="o" if len(line.x) <= MARKED else None, markersize=4, **look)
        if line.low is not None:
            axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.2, linewidth=0)
    for name, value in (references or {}).items():
        axes.axhline(value, color="grey", linestyle="--", linewidth=1, zorder=0)
        beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(name, (1, value), (4, 0), va="center", fontsize=9, color="dimgrey", **beside)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_linewidth(0.8)
    axes.tick_params(width=0.8)


def style(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour for each label and, after the last colour, another line style."""
    n = len(COLOURS)
    return {
        label: {"color": COLOURS[i % n], "linestyle": STROKES[i // n % len(STROKES)], "linewidth": 1.6}
        for i, label in enumerate(labels)
    }


def environment_references(experiments: Sequence[Experiment], metric: str) -> dict[str, float]:
    """Scores of an optimal agent and of the best agent without memory, if all runs have one environment with both."""
    known = known_references(experiments[0].env)
    if known is None or known.metric != find_metric(metric).column or len({str(e.env) for e in experiments}) > 1:
        return {}
    return {"optimal": known.optimal, "without memory": known.memoryless}


def write_table(lines: Sequence[Line], path: Path, x: str = "frames", statistic: str = "mean") -> None:
    """The numbers of a figure. Without an interval, the cells of its bounds are empty."""
    with path.open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow(["label", x, statistic, "low", "high", "seeds"])
        for line in lines:
            for i in range(len(line.x)):
                interval = ["" if bound is None else f"{bound[i]:.9g}" for bound in (line.low, line.high)]
                write.writerow([line.label, f"{line.x[i]:.12g}", f"{line.y[i]:.9g}", *interval, line.seeds])


def output_files(out: Path) -> tuple[Path, Path, Path]:
    """The paths of PNG, SVG and CSV. A CSV file that plot did not write is not overwritten."""
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"out={out} must end in .png or .svg")
    table = out.with_suffix(".csv")
    if table.exists() and not table.read_text().startswith("label,"):
        raise UserError(f"{table} exists and was not written by plot: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_suffix(".png"), out.with_suffix(".svg"), table
