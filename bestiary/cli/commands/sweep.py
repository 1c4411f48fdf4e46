"""bestiary sweep PRESET: hyper-parameter search."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from bestiary.cli.commands.train import Signals
from bestiary.cli.parse import FLAT, ExecutorName, Flat, check_parts, parse
from bestiary.config.extras import require
from bestiary.config.plugins import load_plugins
from bestiary.errors import UserError
from bestiary.launch.executor import choose_executor
from bestiary.launch.spaces import BUILTIN, as_text
from bestiary.launch.sweep_settings import SweepSettings
from bestiary.presets import preset
from bestiary.training.run import new_path

if TYPE_CHECKING:
    from bestiary.launch.sweep import TrialResult

USAGE = """\
usage: bestiary sweep PRESET [part:choice ...] [--flags] --space SPACE [--trials N] [--run DIR]

SPACE is the name of a builtin search space (%s) or a .toml or .json file. For each hyper-parameter, the file has
{low, high}, with step or log if wanted, or {choices}:

  "algo.optimizer.lr" = {low = 1e-5, high = 1e-2, log = true}
  "net.frame-stack" = {choices = [1, 2, 4]}

The same command with the same --run resumes a sweep. With --executor ray or ray:HOST:PORT, the runs are processes of a
Ray cluster.

`bestiary sweep PRESET --help` lists every setting; presets are those of `bestiary train`."""
TABLE_ROWS = 10


@dataclass(frozen=True)
class SweepCommand:
    experiment: Flat
    space: str | None = None
    """search space: the name of a builtin one, or a .toml or .json file"""
    sweep: Annotated[SweepSettings, FLAT] = field(default_factory=SweepSettings)
    jobs: int | None = None
    """runs in parallel; None: one per core, of this machine or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """local: runs are processes of this machine; ray[:ADDRESS]: of a Ray cluster, at RAY_ADDRESS, auto or HOST:PORT"""
    run: Path | None = None
    """directory of the sweep, which holds its runs DIR/trial0000/seed0 ...; None: a new one under runs/"""


def main(args: list[str]) -> int:
    load_plugins()
    if not args or args[0] in ("-h", "--help"):
        print(USAGE % ", ".join(BUILTIN))
        return 0 if args else 2
    cfg = read(args)
    if cfg.space is None:
        raise UserError(f"--space is missing: name a .toml or .json file, or one of {', '.join(BUILTIN)}")
    require("optuna", "sweep")
    from bestiary.launch.sweep import best_flags, sweep

    root = cfg.run or new_path(f"{args[0]}-sweep", cfg.experiment.seed)
    stop = Signals()
    with choose_executor(cfg.executor) as executor:
        trials = sweep(
            cfg.experiment,
            cfg.space,
            root,
            cfg.sweep,
            cfg.jobs,
            log=lambda text: print(text, flush=True),
            stop=stop,
            executor=executor,
        )
    print_best(trials, cfg.sweep.metric)
    files = [root / name for name in ("trials.csv", "sweep.png") if (root / name).exists()]
    print(f"written to {' and '.join(map(str, files))}")
    if words := best_flags(cfg.experiment, trials):
        print(f"flags of the best trial for `bestiary train`: {' '.join(words)}")
    if stop.received:
        print(f"stopped; the same command with --run {root} resumes")
        return 128 + stop.received
    return 0


def read(args: list[str]) -> SweepCommand:
    """Settings from PRESET and flags."""
    name, rest = args[0], args[1:]
    return parse(SweepCommand, check_parts(rest), f"bestiary sweep {name}", SweepCommand(preset(name)))


def print_best(trials: "list[TrialResult]", metric: str) -> None:
    counts = {state: sum(t.state == state for t in trials) for state in ("complete", "pruned", "failed", "running")}
    names = {"complete": "finished", "pruned": "pruned", "failed": "failed", "running": "interrupted"}
    title = ", ".join(f"{n} {names[state]}" for state, n in counts.items() if n)
    table = Table(title=f"trials: {title}", title_justify="left", box=None)
    searched = max((list(trial.values) for trial in trials), key=len, default=[])
    last = [name.rpartition(".")[2] for name in searched]
    short = [end if last.count(end) == 1 else name for name, end in zip(searched, last, strict=True)]
    for column in ("trial", metric, "seeds", *short):
        table.add_column(column, justify="right", no_wrap=column == "seeds", overflow="fold")
    for trial in [t for t in trials if t.state == "complete"][:TABLE_ROWS]:
        seeds = ", ".join(f"{value:.2f}" for value in trial.seeds.values())
        values = [f"{v:.3g}" if isinstance(v, float) else as_text(v) for v in trial.values.values()]
        table.add_row(str(trial.number), f"{trial.value:.3f}", seeds, *values)
    Console().print(table)
