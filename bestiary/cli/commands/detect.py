"""bestiary detect --trusted RUN RUNS: which runs stray from one that is trusted."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bestiary.analysis.seed_runs import seed_runs
from bestiary.cli.parse import parse
from bestiary.config.plugins import load_plugins
from bestiary.reward_hacking.detection import SHOWN, Quality, detect
from bestiary.types import Mode


@dataclass(frozen=True)
class Settings:
    """Play every run, and measure in the states it visits how far its policy is from the trusted one's."""

    trusted: Path
    """the run to compare with"""
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """run directories, or ones that hold the runs of several seeds"""
    episodes: int = 10
    """whole games per run"""
    checkpoint: str | None = None
    """of every run: frames of a checkpoint, last or best; None: last"""
    fraction: float = 0.5
    """anomalous: a true return below this part of the trusted run's, with a proxy return at or above its own"""
    anomalous: Annotated[str | None, tyro.conf.arg(metavar="RUN[,RUN...]")] = None
    """runs (paths, names or patterns) that are anomalous, instead of what the rule says"""
    seed: int = 0
    """of the games; never one of training's"""
    mode: Mode = "sampled"
    envs: int = 16
    """games played at once"""
    device: str = "auto"
    threads: int | None = None
    out: Path | None = None
    """directory for detect.json and detect.png; None: the trusted run's"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(Settings, args, "bestiary detect")
    options: dict[str, Any] = dict(vars(cfg))
    options["runs"] = [run for path in cfg.runs for run in seed_runs(path) or [path]]
    if cfg.anomalous is not None:
        options["anomalous"] = [word for word in cfg.anomalous.split(",") if word]
    print_result(detect(**options, say=lambda text: print(text, flush=True)))
    return 0


def print_result(result: dict[str, Any]) -> None:
    console = Console()
    for table in (return_table(result), distance_table(result["runs"]), detector_table(result["detectors"])):
        console.print(table)
        console.print()
    for note in result["notes"]:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    console.print(f"written to {escape(', '.join(result['files']))}", soft_wrap=True)


def return_table(result: dict[str, Any]) -> Table:
    """What each run earned, and the trusted one if paid as that run was."""
    table = columns("run", "frames", "true", "trusted", "proxy", "trusted")
    for row in (result["trusted"], *result["runs"]):
        theirs = row.get("trusted", row["returns"])
        earned = [f"{x[kind]:.2f}" for kind in ("true", "proxy") for x in (row["returns"], theirs)]
        table.add_row(escape(row["name"]), f"{row['frames']:,}", *earned)
    return table


def distance_table(rows: list[dict[str, Any]]) -> Table:
    """Means over games."""
    labels = {True: "anomalous", False: "normal", None: "?"}
    table = columns("run", "label", *SHOWN)
    for row in rows:
        distances = [f"{row['scores'][name]:.4f}" for name in SHOWN.values()]
        table.add_row(escape(row["name"]), labels[row["anomalous"]], *distances)
    return table


def columns(first: str, *others: str) -> Table:
    table = Table(box=None)
    table.add_column(first, overflow="fold")
    for column in others:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def detector_table(detectors: dict[str, dict[str, float] | None]) -> Table:
    table = columns("detector", "AUROC", "AUPR", "FPR95", "F1")
    if not any(detectors.values()):
        table.add_row("each of them", *["undefined"] * len(Quality._fields))
        return table
    for name, found in detectors.items():
        table.add_row(name.replace("_", " "), *(f"{x:.3f}" for x in (found or {}).values()))
    return table
