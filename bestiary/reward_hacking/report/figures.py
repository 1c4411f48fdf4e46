"""Figures of the report, each as a base64-encoded PNG."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from bestiary.analysis.curves import Line
from bestiary.analysis.plot import draw, style
from bestiary.config.extras import require
from bestiary.reward_hacking.statistics import (
    ChangePoint,
    Estimate,
    Row,
    component_rates,
    estimate,
    falls,
    run_means,
    select,
)
from bestiary.types import Mode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 11.2  # inches; at 150 dpi, text has about its nominal size on a page of 1200 pixels
FONTS = {"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 10.5, "text.parse_math": False}
MARKERS = "os^Dv"
MODES: tuple[Mode, ...] = ("greedy", "sampled")
SIDES = {"proxy_return": "proxy return per episode", "true_return": "true return per episode"}

Size = tuple[int, int]  # width, depth
Styles = Mapping[Size, Mapping[str, Any]]
P = ParamSpec("P")


def as_png(figure: "Callable[P, Figure]") -> Callable[P, str]:
    """Return a figure as a base64-encoded PNG. The style is fixed: equal studies give equal figures."""

    @wraps(figure)
    def encoded(*args: P.args, **kwargs: P.kwargs) -> str:
        require("matplotlib", "plot")
        from matplotlib.style import context

        file = io.BytesIO()
        with context(["default", FONTS]):
            figure(*args, **kwargs).savefig(file, format="png", dpi=150, metadata={"Software": None})
        return base64.b64encode(file.getvalue()).decode()

    return encoded


def new_figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def shorten(text: str, most: int = 32) -> str:
    """A name shortened to leave room for the figure."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def size_label(size: Size) -> str:
    return f"width {size[0]}, depth {size[1]}"


def sizes_of(rows: Sequence[Row]) -> list[Size]:
    return sorted({(row["width"], row["depth"]) for row in rows})


def proxies_of(rows: Sequence[Row]) -> list[str]:
    """In the order of the study."""
    return list(dict.fromkeys(row["proxy"] for row in rows))


def styles_of(rows: Sequence[Row]) -> Styles:
    """A colour, line style and marker per size, the same in every figure."""
    sizes = sizes_of(rows)
    depths = sorted({depth for _, depth in sizes})
    lines = style(size_label(size) for size in sizes)
    return {s: {**lines[size_label(s)], "marker": MARKERS[depths.index(s[1]) % len(MARKERS)]} for s in sizes}


@as_png
def over_frames(rows: Sequence[Row], styles: Styles, titles: Sequence[str]) -> "Figure":
    """Proxy and true return of one proxy in one mode over training."""
    figure = new_figure(4.4 + 0.22 * -(-len(sizes_of(rows)) // 4))  # four labels per line of the legend
    lines = {size_label(s): {k: v for k, v in props.items() if k != "marker"} for s, props in styles.items()}
    left, right = figure.subplots(1, 2)
    for axes, title, (key, name) in zip((left, right), titles, SIDES.items(), strict=True):
        curves = [curve(select(rows, width=w, depth=d), key, size_label((w, d))) for w, d in sizes_of(rows)]
        draw(axes, curves, styles=lines)
        axes.set(xlabel="training frames", ylabel=name)
        axes.set_xlim(left=0)
        finish(axes, title, numbers="y")
    legend(figure, left)
    return figure


def curve(rows: Sequence[Row], key: str, label: str) -> Line:
    """Mean over seeds at every checkpoint; with a single seed the interval has a gap."""
    x = sorted({row["frames"] for row in rows})
    at = [estimate(run_means(select(rows, frames=frames), key)) for frames in x]
    alone = all(e.low is None for e in at)
    low, high = (None if alone else np.array([getattr(e, side) for e in at], float) for side in ("low", "high"))
    return Line(label, np.array(x), np.array([e.mean for e in at]), low, high, max(e.n for e in at))


@as_png
def over_sizes(rows: Sequence[Row], styles: Styles, titles: Sequence[str], change: ChangePoint | None) -> "Figure":
    """Proxy and true return of one proxy at one checkpoint, over parameters."""
    figure = new_figure(4.4 + 0.22 * -(-len(sizes_of(rows)) // 4))  # four labels per line of the legend
    left, right = figure.subplots(1, 2)
    for axes, title, (key, name) in zip((left, right), titles, SIDES.items(), strict=True):
        points = {s: select(rows, width=s[0], depth=s[1]) for s in sizes_of(rows)}
        for size, runs in points.items():
            x, y = runs[0]["parameters"], run_means(runs, key)
            beside = [x * 1.04] * len(y)  # otherwise the interval would cover them
            axes.plot(beside, y, ".", color=styles[size]["color"], alpha=0.7, markersize=6)
            dot(axes, x, estimate(y), styles[size], size_label(size))
        means = sorted((runs[0]["parameters"], run_means(runs, key).mean()) for runs in points.values())
        axes.plot(*zip(*means, strict=True), color="0.7", linewidth=1, zorder=0)
        log_axis(axes, [x for x, _ in means])
        axes.set(xlabel="parameters (log scale)", ylabel=name)
        finish(axes, title, numbers="y")
    if change is not None and falls(change):
        middle = (change.before * change.after) ** 0.5
        right.axvline(middle, color="black", linestyle="--", linewidth=1.2)
        beside = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        right.annotate("fall", (middle, 1), (5, -11), **beside)
    legend(figure, left)
    return figure


def dot(axes: Any, x: float, e: Estimate, props: Mapping[str, Any], label: str = "", across: bool = False) -> None:
    """A mean with its interval, if it has one; vertical, or horizontal (`across`)."""
    error_bar = None if e.low is None or e.high is None else [[max(0, e.mean - e.low)], [max(0, e.high - e.mean)]]
    marks = {"color": props["color"], "marker": props["marker"], "markersize": 7, "capsize": 3, "linestyle": "none"}
    place = {"x": e.mean, "y": x, "xerr": error_bar} if across else {"x": x, "y": e.mean, "yerr": error_bar}
    axes.errorbar(**place, **marks, label=label)


def log_axis(axes: Any, x: Sequence[float]) -> None:
    """A log scale with enough tick labels, however short it is."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    decades = np.log10(max(x) / min(x))
    subs = (1, 1.5, 2, 3, 4, 6, 8) if decades < 0.8 else (1, 2, 5) if decades < 2 else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=99))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    room = 10 ** max(0.06, 0.06 * decades)
    axes.set_xlim(min(x) / room, max(x) * room)


@as_png
def proxy_against_true(rows: Sequence[Row], styles: Styles) -> "Figure":
    """A panel per proxy, a marker per run: filled is greedy, hollow is sampled."""
    from matplotlib.lines import Line2D

    proxies = proxies_of(rows)
    columns = min(3, max(2, len(proxies)))
    lines = -(-len(proxies) // columns)
    figure = new_figure(0.7 + 3.7 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, proxy in zip(panels, proxies, strict=False):
        for row in select(rows, proxy=proxy):
            props = styles[row["width"], row["depth"]]
            x, y = (np.mean(row[key]) for key in SIDES)
            face = props["color"] if row["mode"] == "greedy" else "none"
            axes.plot(x, y, props["marker"], color=props["color"], markerfacecolor=face, markersize=7, alpha=0.85)
        axes.set(xlabel=SIDES["proxy_return"], ylabel=SIDES["true_return"])
        finish(axes, proxy, numbers="xy")
    for axes in panels[len(proxies) :]:
        axes.set_visible(False)
    names = [
        Line2D([], [], color=styles[s]["color"], marker=styles[s]["marker"], linestyle="none", label=size_label(s))
        for s in sizes_of(rows)
    ]
    for mode, face in zip(MODES, ("0.4", "none"), strict=True):
        names.append(Line2D([], [], color="0.4", marker="o", markerfacecolor=face, linestyle="none", label=mode))
    figure.legend(handles=names, loc="outside lower center", ncols=4, frameon=False)
    return figure


@as_png
def components_per_step(rows: Sequence[Row], styles: Styles, names: Sequence[str]) -> "Figure":
    """Mean per step: a panel per component, a row per proxy, a marker per size."""
    proxies, sizes = proxies_of(rows), sizes_of(rows)
    columns = min(4, max(2, len(names)))
    lines = -(-len(names) // columns)
    row_height = max(0.55, 0.14 * len(sizes) + 0.2)
    figure = new_figure(0.8 + lines * (0.95 + row_height * len(proxies)))
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    offsets = np.linspace(-0.36, 0.36, len(sizes)) if len(sizes) > 1 else [0]
    for axes, name in zip(panels.ravel(), names, strict=False):
        for i, proxy in enumerate(proxies):
            for size, offset in zip(sizes, offsets, strict=True):
                found = component_rates(select(rows, proxy=proxy, width=size[0], depth=size[1]), name)
                if len(found):
                    first = size_label(size) if i == 0 else ""
                    dot(axes, i + offset, estimate(found), styles[size], first, across=True)
            if i:
                axes.axhline(i - 0.5, color="0.85", linewidth=0.8, zorder=0)
        axes.set_yticks(range(len(proxies)), [shorten(proxy, 18) for proxy in proxies])
        axes.set_ylim(len(proxies) - 0.5, -0.5)
        axes.set_xlabel("per step")
        low, high = axes.get_xlim()
        low, high = min(0, low), max(0, high)  # include 0, so that small differences look small
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        finish(axes, name, numbers="x", most=4)
    for axes in panels.ravel()[len(names) :]:
        axes.set_visible(False)
    legend(figure, panels[0, 0])
    return figure


@as_png
def action_shares(rows: Sequence[Row], actions: Sequence[str]) -> "Figure":
    """Action frequencies: a row per proxy and size, a column per action. Every run has the same weight."""
    groups = [(proxy, size) for proxy in proxies_of(rows) for size in sizes_of(select(rows, proxy=proxy))]
    table = np.array([shares(select(rows, proxy=p, width=w, depth=d)) for p, (w, d) in groups])
    figure = new_figure(1.9 + 0.36 * len(groups))
    axes = figure.subplots()
    top = max(float(table.max()), 1e-9)
    image = axes.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=top)
    for (i, j), share in np.ndenumerate(table):
        if share >= 0.005:
            ink = "white" if share > 0.6 * top else "black"
            axes.text(j, i, f"{share:.0%}", ha="center", va="center", fontsize=9, color=ink)
    names = (
        [shorten(a, 18) for a in actions] if len(actions) == table.shape[1] else [str(i) for i in range(table.shape[1])]
    )
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=9.5)
    axes.set_yticks(
        range(len(groups)), [f"{shorten(proxy)}, {size_label(size)}" for proxy, size in groups], fontsize=10
    )
    proxies = [proxy for proxy, _ in groups]
    for i in range(1, len(proxies)):
        if proxies[i] != proxies[i - 1]:
            axes.axhline(i - 0.5, color="black", linewidth=1)
    axes.set_xlabel("action")
    figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025, format=lambda x, _: f"{x:.0%}").set_label("frequency")
    return figure


def shares(rows: Sequence[Row]) -> np.ndarray:
    counts = np.array([row["action_counts"] for row in rows], float)
    return (counts / counts.sum(1, keepdims=True)).mean(0)


def finish(axes: Any, title: str, numbers: str, most: int = 6) -> None:
    """A title, and few tick labels with thousands separators on the named axes."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(shorten(title, 44), loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    for which in numbers:
        axis = getattr(axes, f"{which}axis")
        if not np.any(getattr(axes.dataLim, f"interval{which}")):  # only 0: avoid an axis of hundredths around it
            getattr(axes, f"set_{which}lim")(-0.05, 1.05)
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))


def legend(figure: "Figure", axes: Any) -> None:
    names, labels = axes.get_legend_handles_labels()
    figure.legend(names, labels, loc="outside lower center", ncols=min(4, max(1, len(labels))), frameon=False)
