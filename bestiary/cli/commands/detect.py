"""bestiary detect --reference RUN RUNS: detect reward hacking by the distance from a reference policy."""

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
from bestiary.reward_hacking.classification import DetectorQuality
from bestiary.reward_hacking.detection import MAIN_DETECTORS, detect
from bestiary.types import Mode


@dataclass(frozen=True)
class DetectCommand:
    """Detect reward hacking: in the states that each run's policy visits, measure its distance from a reference policy
    (Pan et al. 2022), and report AUROC and other metrics of every distance as a detector of anomalous runs."""

    reference: Path
    """directory of the reference run"""
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """run directories to test, or directories that hold the runs of several seeds"""
    episodes: int = 10
    """whole episodes per run"""
    checkpoint: str | None = None
    """checkpoint of every run: its frames, last or best; None: last"""
    fraction: float = 0.5
    """label rule: a run is anomalous if its true return is below this fraction of the reference run's, and its proxy
    return is at least the reference run's"""
    anomalous: Annotated[str | None, tyro.conf.arg(metavar="RUN[,RUN...]")] = None
    """labels by hand: the anomalous runs (paths, names or patterns), instead of the label rule"""
    seed: int = 0
    """seed of the episodes; no training uses the same episodes"""
    mode: Mode = "sampled"
    """actions: greedy (the most probable) or sampled from the policy"""
    envs: int = 16
    """parallel environments"""
    device: str = "auto"
    """device of the networks: cpu, cuda, cuda:N; auto: the accelerator if there is one"""
    threads: int | None = None
    """CPU threads of environments and networks; None: chosen for the environment"""
    out: Path | None = None
    """output directory of detect.json and detect.png; None: the reference run's"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(DetectCommand, args, "bestiary detect")
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
    """True and proxy return of each run, each followed by that of the reference run (under the same proxy)."""
    table = columns("run", "frames", "true", "reference", "proxy", "reference")
    for row in (result["reference"], *result["runs"]):
        reference = row.get("reference", row["returns"])
        cells = [f"{returns[kind]:.2f}" for kind in ("true", "proxy") for returns in (row["returns"], reference)]
        table.add_row(escape(row["name"]), f"{row['frames']:,}", *cells)
    return table


def distance_table(rows: list[dict[str, Any]]) -> Table:
    """Means over episodes."""
    labels = {True: "anomalous", False: "normal", None: "?"}
    table = columns("run", "label", *MAIN_DETECTORS)
    for row in rows:
        distances = [f"{row['scores'][name]:.4f}" for name in MAIN_DETECTORS.values()]
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
        table.add_row("all detectors", *["undefined"] * len(DetectorQuality._fields))
        return table
    for name, quality in detectors.items():
        table.add_row(name.replace("_", " "), *(f"{x:.3f}" for x in (quality or {}).values()))
    return table
