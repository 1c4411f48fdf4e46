"""How far a cluster would carry: measured figures of one machine, played through with up to a thousand actors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from bestiary.bench.scaling.model import Cluster, Point, read
from bestiary.bench.scaling.plot import ACTORS, Row, check_target, draw, one_machine, predict, scenarios
from bestiary.errors import UserError

SHOWN = (1, 10, 100, 1000)


@dataclass(frozen=True)
class Settings:
    """bestiary bench scaling"""

    figures: Path = Path("benchmarks/speed/cluster.json")
    """what `bestiary bench cluster` measured"""
    out: Path | None = None
    """a picture: .png or .svg"""
    rounds: int = 20
    """unrolls that every actor plays, about"""
    in_flight: int = 1
    """unrolls of an actor at once"""
    queue: int = 16
    """trajectories' worth of updates that make actors wait"""
    wake: Literal["all", "some"] = "all"
    """which actors begin again then"""
    seed: int = 0


def main(cfg: Settings) -> dict[str, Any]:
    if cfg.rounds < 1:
        raise UserError(f"rounds={cfg.rounds} must be at least 1")
    if cfg.out:
        check_target(cfg.out)
    base = Cluster(actors=1, in_flight=cfg.in_flight, queue=cfg.queue, wake=cfg.wake)
    measured, points = read(cfg.figures)
    actors = ACTORS if cfg.out else SHOWN
    found = {
        name: predict(*cluster, actors, cfg.rounds, cfg.seed) for name, cluster in scenarios(measured, base).items()
    }
    checked = predict(*one_machine(measured, base), [p.actors for p in points], cfg.rounds, cfg.seed)
    console = Console(width=110)
    if points:
        console.print(f"\nOne machine of {measured.cores} cores, frames/s:")
        console.print(against(points, checked))
    console.print("\nClusters, frames/s:")
    console.print(table(found))
    if cfg.out:
        draw(measured, points, cfg.out, base, found, checked)
        console.print(f"\n{cfg.out}")
    rows = {name: [row._asdict() for row in lines] for name, lines in found.items()}
    return {"clusters": rows, "one machine": [row._asdict() for row in checked]}


def against(points: Sequence[Point], rows: Sequence[Row]) -> Table:
    """What was measured beside what was foretold."""
    shown = columns("actors", "measured", "simulated", "bound", "simulated / measured")
    for point, row in zip(points, rows, strict=True):
        rates = (point.frames_per_second, row.simulated, row.bound)
        share = row.simulated / point.frames_per_second
        shown.add_row(f"{point.actors:,}", *(f"{rate:,.0f}" for rate in rates), f"{share:.2f}")
    return shown


def table(found: dict[str, list[Row]]) -> Table:
    shown = columns("cluster", "actors", "simulated", "bound", "most used", "lag in updates")
    for name, rows in found.items():
        for row in rows:
            if row.actors in SHOWN:
                numbers = (f"{row.actors:,}", f"{row.simulated:,.0f}", f"{row.bound:,.0f}")
                shown.add_row(name, *numbers, row.saturates, f"{row.lag:,.0f}")
    return shown


def columns(*names: str) -> Table:
    shown = Table(box=MARKDOWN)
    for name in names:
        shown.add_column(name, justify="left" if name in ("cluster", "most used") else "right")
    return shown
