"""A figure of scaling: frames per second over the number of actors, and the bottleneck of each cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bestiary.analysis.plot import style
from bestiary.bench.scaling.model import Cluster, Measured, Throughput, bound
from bestiary.config.extras import require
from bestiary.errors import UserError

ACTORS = (1, 2, 3, 4, 6, 8, 10, 16, 24, 32, 48, 64, 100, 150, 200, 300, 450, 700, 1000)
GIGABIT = 1.25e8  # bytes per second


class ScalingRow(NamedTuple):
    """Predictions for one number of actors."""

    actors: int
    simulated: float  # frames/s
    bound: float  # frames/s
    bottleneck: str  # the resource with the highest utilisation in the simulation
    lag: float  # policy lag in updates


def scenarios(m: Measured, base: Cluster) -> dict[str, tuple[Measured, Cluster]]:
    """Clusters to predict: a learner as measured and faster ones, two bandwidths, one shard and four."""
    slow, fast = (replace(base, link_bytes_per_second=n * GIGABIT) for n in (1, 10))
    ten, hundred = (replace(m, update_seconds=m.update_seconds / n) for n in (10, 100))
    return {
        "1 Gbit/s": (m, slow),
        "1 Gbit/s, learner 10x": (ten, slow),
        "10 Gbit/s, learner 10x": (ten, fast),
        "10 Gbit/s, learner 100x": (hundred, fast),
        "10 Gbit/s, learner 100x, 4 shards": (hundred, replace(fast, shards=4, placement="own-nodes")),
    }


def one_machine(m: Measured, base: Cluster) -> tuple[Measured, Cluster]:
    """The machine on which the throughput was measured."""
    return m, replace(base, placement="single-node", cores=m.cores)


def predict(m: Measured, c: Cluster, actors: Sequence[int], rounds: int = 20, seed: int = 0) -> list[ScalingRow]:
    """Simulate a cluster with each number of actors."""
    require("simpy", "scaling")
    from bestiary.bench.scaling.simulator import long_enough, simulate

    rows = []
    for count in actors:
        cluster = replace(c, actors=count)
        found = simulate(m, cluster, long_enough(m, cluster, rounds), seed)
        limit = bound(m, cluster).frames_per_second
        rows.append(ScalingRow(count, found.frames_per_second, limit, found.bottleneck, found.lag))
    return rows


def saturation(m: Measured, c: Cluster, max_actors: int = 1000) -> tuple[int, str] | None:
    """The smallest number of actors at which another resource is the bottleneck, and that resource."""
    for count in range(1, max_actors + 1):
        if (limit := bound(m, replace(c, actors=count)).bottleneck) != "actors":
            return count, limit
    return None


def draw(
    m: Measured,
    points: Sequence[Throughput],
    path: Path,
    base: Cluster = Cluster(actors=1),  # noqa: B008 (frozen)
    found: Mapping[str, Sequence[ScalingRow]] | None = None,
    checked: Sequence[ScalingRow] | None = None,
) -> None:
    """Draw simulations (`found`; `checked` for the measured machine) as lines, bounds dashed, measurements as dots."""
    check_output(path)
    from matplotlib.figure import Figure
    from matplotlib.style import context
    from matplotlib.ticker import EngFormatter

    path.parent.mkdir(parents=True, exist_ok=True)
    clusters = scenarios(m, base)
    found = {name: predict(*clusters[name], ACTORS) for name in clusters} if found is None else found
    looks = style(clusters)
    with context(["default", {"svg.hashsalt": "bestiary"}]):
        figure = Figure(figsize=(8.4, 4.8), layout="constrained")
        axes = figure.subplots()
        labelled: list[float] = []
        for name, (measured, cluster) in clusters.items():
            line(axes, found[name], looks[name], name)
            mark_saturation(axes, measured, cluster, looks[name]["color"], labelled)
        if checked := checked or predict(*one_machine(m, base), [p.actors for p in points]):
            line(axes, checked, {"color": "black", "linewidth": 1.6}, f"one machine, {m.cores} cores")
        if points:
            x, y = [p.actors for p in points], [p.frames_per_second for p in points]
            axes.plot(x, y, "o", color="black", markersize=6, label="measured", zorder=4)
        axes.plot([], [], color="grey", linestyle="--", linewidth=1, label="bound")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel(f"actors of {m.envs} environments")
        axes.set_ylabel("frames/s")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda i: -last_rate(found, labels[i]))  # top line first
        figure.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            loc="outside right upper",
            frameon=False,
            fontsize=9,
        )
        figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})


def check_output(path: Path) -> None:
    """Raise a UserError if no figure can be written to a path."""
    require("matplotlib", "plot")
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"out={path} must end in .png or .svg")


def last_rate(found: Mapping[str, Sequence[ScalingRow]], label: str) -> float:
    return found[label][-1].simulated if label in found else 0.0


def line(axes: Any, rows: Sequence[ScalingRow], look: Mapping[str, Any], label: str) -> None:
    x = [row.actors for row in rows]
    axes.plot(x, [row.simulated for row in rows], label=label, **look)
    axes.plot(x, [row.bound for row in rows], color=look["color"], linestyle="--", linewidth=1, alpha=0.7)


def mark_saturation(axes: Any, m: Measured, c: Cluster, colour: str, labelled: list[float]) -> None:
    """Draw a diamond at the saturation point, and name the bottleneck at the end of the bound's line."""
    if (found := saturation(m, c)) is None:
        return
    actors, bottleneck = found
    rate = bound(m, replace(c, actors=actors)).frames_per_second
    axes.plot([actors], [rate], marker="D", color=colour, markersize=6, zorder=5)
    rate = bound(m, replace(c, actors=ACTORS[-1])).frames_per_second
    close = sum(abs(rate / other - 1) < 0.2 for other in labelled)  # lines with close ends: labels next to each other
    labelled.append(rate)
    where = {"xytext": (-130 * close, 4), "textcoords": "offset points", "ha": "right"}
    axes.annotate(f"{bottleneck}, from {actors} actors", (ACTORS[-1], rate), color=colour, fontsize=9, **where)
