"""`bestiary bench scaling`: predicted throughput of clusters with up to a thousand actors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from bestiary.bench.scaling.model import Cluster, Throughput, read
from bestiary.bench.scaling.plot import ACTORS, ScalingRow, check_output, draw, one_machine, predict, scenarios
from bestiary.errors import UserError

SHOWN = (1, 10, 100, 1000)


@dataclass(frozen=True)
class ScalingBench:
    """bestiary bench scaling"""

    measurements: Path = Path("benchmarks/speed/cluster.json")
    """file that `bestiary bench cluster --json FILE` wrote"""
    out: Path | None = None
    """file for a figure, .png or .svg; None: no figure"""
    rounds: int = 20
    """approximate number of unrolls of every actor in a simulation"""
    in_flight: int = 1
    """largest number of unrolls of an actor that have started and are not stored yet"""
    queue: int = 16
    """trajectories for which updates may be due in a shard; while there are more, its actors pause"""
    wake: Literal["all", "some"] = "all"
    """paused actors that continue once fewer updates are due; some: two for each trajectory that leaves the shard"""
    seed: int = 0
    """seed of the random durations of unrolls"""


def main(cfg: ScalingBench) -> dict[str, Any]:
    """Print measured and predicted throughput, and draw the figure if one is requested."""
    if cfg.rounds < 1:
        raise UserError(f"rounds={cfg.rounds} must be at least 1")
    if cfg.out:
        check_output(cfg.out)
    base = Cluster(actors=1, in_flight=cfg.in_flight, queue=cfg.queue, wake=cfg.wake)
    measured, points = read(cfg.measurements)
    actors = ACTORS if cfg.out else SHOWN
    found = {
        name: predict(*cluster, actors, cfg.rounds, cfg.seed) for name, cluster in scenarios(measured, base).items()
    }
    checked = predict(*one_machine(measured, base), [p.actors for p in points], cfg.rounds, cfg.seed)
    console = Console(width=110)
    if points:
        console.print(f"\nOne machine of {measured.cores} cores, frames/s:")
        console.print(comparison(points, checked))
    console.print("\nClusters, frames/s:")
    console.print(table(found))
    if cfg.out:
        draw(measured, points, cfg.out, base, found, checked)
        console.print(f"\n{cfg.out}")
    rows = {name: [row._asdict() for row in lines] for name, lines in found.items()}
    return {"clusters": rows, "one machine": [row._asdict() for row in checked]}


def comparison(points: Sequence[Throughput], rows: Sequence[ScalingRow]) -> Table:
    """Measured and predicted throughput of one machine."""
    shown = columns("actors", "measured", "simulated", "bound", "simulated / measured")
    for point, row in zip(points, rows, strict=True):
        rates = (point.frames_per_second, row.simulated, row.bound)
        ratio = row.simulated / point.frames_per_second
        shown.add_row(f"{point.actors:,}", *(f"{rate:,.0f}" for rate in rates), f"{ratio:.2f}")
    return shown


def table(found: dict[str, list[ScalingRow]]) -> Table:
    """Predicted throughput of every cluster."""
    shown = columns("cluster", "actors", "simulated", "bound", "bottleneck", "lag in updates")
    for name, rows in found.items():
        for row in rows:
            if row.actors in SHOWN:
                numbers = (f"{row.actors:,}", f"{row.simulated:,.0f}", f"{row.bound:,.0f}")
                shown.add_row(name, *numbers, row.bottleneck, f"{row.lag:,.0f}")
    return shown


def columns(*names: str) -> Table:
    shown = Table(box=MARKDOWN)
    for name in names:
        shown.add_column(name, justify="left" if name in ("cluster", "bottleneck") else "right")
    return shown
