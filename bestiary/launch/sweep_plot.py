"""Figure of a sweep: importances of the hyper-parameters, and a parallel coordinate plot of the trials."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.analysis.plot import COLOURS
from bestiary.config.extras import require
from bestiary.launch.spaces import Choices, Range, Space, as_text

if TYPE_CHECKING:
    from bestiary.launch.sweep import TrialResult


def plot_sweep(
    space: Space, metric: str, trials: Sequence["TrialResult"], importances: Mapping[str, float], path: Path
) -> None:
    require("matplotlib", "plot")
    from matplotlib.figure import Figure
    from matplotlib.style import context

    searched = {name: entry for name, entry in space.items() if len(entry.samples()) > 1}
    width = 1.5 * (len(searched) + 1)
    with context(["default"]):
        figure = Figure(figsize=(4.2 + width, 1.6 + 0.34 * max(7, len(searched))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2.2, width))
        draw_importances(left, importances, trials)
        draw_trials(right, searched, trials, metric)
        figure.savefig(path, dpi=150, metadata={"Software": None})


def draw_importances(axes: Any, shares: Mapping[str, float], trials: Sequence["TrialResult"]) -> None:
    axes.set_title("importance of hyper-parameters", loc="left", fontsize=11, pad=16)
    axes.spines[["top", "right"]].set_visible(False)
    if not shares:
        axes.set_axis_off()
        complete = sum(trial.state == "complete" for trial in trials)
        axes.text(
            0, 0.98, f"too few finished trials\nto estimate it: {complete}", va="top", color="dimgrey", fontsize=9
        )
        return
    names = sorted(shares, key=lambda name: shares[name])
    axes.barh(names, [shares[name] for name in names], color=COLOURS[0], height=0.6)
    axes.set_xlabel("importance (PED-ANOVA, sums to 1)")
    axes.tick_params(labelsize=9)


def draw_trials(axes: Any, space: Space, trials: Sequence["TrialResult"], metric: str) -> None:
    """Parallel coordinates: a vertical axis per hyper-parameter and one for the metric; pruned trials are grey."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    complete = {trial.number: trial.value for trial in trials if trial.state == "complete" and trial.value is not None}
    low, high = min(complete.values(), default=0.0), max(complete.values(), default=1.0)
    norm = Normalize(low, high if high > low else low + 1)
    colours = colormaps["viridis"]
    pruned = sum(trial.state == "pruned" for trial in trials)
    title = f"{len(complete)} trials, best {metric} {high:.3g}" if complete else "no trial is finished"
    title += f" (grey: {pruned} pruned)" if pruned else ""
    axes.set_title(title, loc="left", fontsize=11, pad=16)
    for trial in reversed(trials):  # the best is plotted last, on top
        if trial.state not in ("complete", "pruned"):
            continue
        heights = [height(entry, trial.values[name], trial.number) for name, entry in space.items()]
        style: dict[str, Any] = {"color": "0.8", "linewidth": 0.8, "zorder": 1}
        if trial.number in complete:
            value = complete[trial.number]
            heights.append(float(norm(value)))
            best = trial is trials[0]
            style = {"color": colours(norm(value)), "linewidth": 2.6 if best else 1.1, "alpha": 1 if best else 0.75}
        axes.plot(range(len(heights)), heights, **style)
    for at, (name, entry) in enumerate(space.items()):
        scale(axes, at, name, ticks(entry))
    scale(axes, len(space), metric, [(float(norm(v)), f"{v:.3g}") for v in np.linspace(low, high, 5)])
    axes.set_xlim(-0.35, len(space) + 0.45)
    axes.set_ylim(-0.04, 1.1)
    axes.set_axis_off()


def scale(axes: Any, at: int, name: str, marks: Sequence[tuple[float, str]]) -> None:
    axes.plot([at, at], [0, 1], color="black", linewidth=0.8, zorder=3)
    head, _, last = name.rpartition(".")
    axes.text(at, 1.04, f"{head}.\n{last}" if head else name, ha="center", va="bottom", fontsize=8.5)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
    for where, text in marks:
        axes.plot([at - 0.02, at + 0.02], [where, where], color="black", linewidth=0.8, zorder=3)
        axes.text(at + 0.04, where, text, va="center", fontsize=7.5, zorder=4, bbox=box)


def height(entry: Range | Choices, value: Any, number: int = 0) -> float:
    """The position of a value on its axis, from 0 to 1. Trials with the same choice are spread a little."""
    if isinstance(entry, Choices):
        spread = 0.012 * ((number * 0.618) % 1 - 0.5)
        return entry.values.index(value) / (len(entry.values) - 1) + spread
    low, high, at = (math.log(x) if entry.log else x for x in (entry.low, entry.high, value))
    return (at - low) / (high - low)


def ticks(entry: Range | Choices) -> list[tuple[float, str]]:
    if isinstance(entry, Choices):
        step = math.ceil(len(entry.values) / 10)  # at most ten labels fit
        shown = {v: f"{v:.3g}" if isinstance(v, float) else as_text(v) for v in entry.values[::step]}
        return [(entry.values.index(v) / (len(entry.values) - 1), text) for v, text in shown.items()]
    if entry.log:
        inside = [10.0**k for k in range(math.ceil(math.log10(entry.low)), math.floor(math.log10(entry.high)) + 1)]
        marks = sorted({entry.low, *inside, entry.high})
    else:
        marks = list(np.linspace(entry.low, entry.high, 5))
    return [(height(entry, float(v)), f"{v:.3g}") for v in marks]
