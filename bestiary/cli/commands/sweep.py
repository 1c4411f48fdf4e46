"""bestiary sweep PRESET: search for good settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from bestiary.cli.commands.train import Signals
from bestiary.cli.parse import ExecutorName, Flat, check_parts, parse
from bestiary.config.extras import require
from bestiary.config.plugins import load_plugins
from bestiary.config.schema import Count
from bestiary.errors import UserError
from bestiary.launch.executor import choose_executor
from bestiary.launch.spaces import BUILTIN, as_text
from bestiary.presets import preset
from bestiary.training.run import new_path

if TYPE_CHECKING:
    from bestiary.launch.sweep import Told

USAGE = """\
usage: bestiary sweep PRESET [part:choice ...] [--flags] --space SPACE [--trials N] [--run DIR]

SPACE is a .toml or .json file, which says for each setting what it may be: {low, high}, with step or log, or {choices}.

  "algo.optimizer.lr" = {low = 1e-5, high = 1e-2, log = true}
  "algo.batch-size" = {choices = [8, 16, 32]}

or the name of a builtin one: %s. Run it again with the same --run to go on. With --executor ray
or ray:HOST:PORT, runs are made on a Ray cluster.

`bestiary sweep PRESET --help` lists every setting; presets are those of `bestiary train`."""
SHOWN = 10


@dataclass(frozen=True)
class SweepCommand:
    experiment: Flat
    space: str | None = None
    """what to search: a .toml or .json file, or the name of a builtin space"""
    trials: Count = 20
    """in all; run again with more to go on"""
    seeds_per_trial: int = 2
    """a trial is worth the mean over its seeds, counted from --seed"""
    metric: Literal["score", "success"] = "score"
    """of evaluations while training"""
    last: int = 1
    """evaluations at the end of a run whose mean counts"""
    sampler: Literal["tpe", "random"] = "tpe"
    """tpe: close to what was good so far; random: anywhere"""
    prune: bool = True
    """stop a trial that is worse than half of the others were at the same time; needs --evaluation.every"""
    jobs: int | None = None
    """runs at a time; None: one per core, of this machine or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """local: runs are processes of this machine; ray[:ADDRESS]: of a Ray cluster, at RAY_ADDRESS, auto or HOST:PORT"""
    run: Path | None = None
    """where trials and results go, DIR/trial0000/seed0 ...; None: a new one under runs/"""


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
        told = sweep(
            cfg.experiment,
            cfg.space,
            cfg.trials,
            root,
            cfg.jobs,
            cfg.seeds_per_trial,
            cfg.metric,
            cfg.last,
            cfg.sampler,
            cfg.prune,
            log=lambda text: print(text, flush=True),
            stop=stop,
            executor=executor,
        )
    print_best(told, cfg.metric)
    files = [root / name for name in ("trials.csv", "sweep.png") if (root / name).exists()]
    print(f"written to {' and '.join(map(str, files))}")
    if words := best_flags(cfg.experiment, told):
        print(f"the best as flags of `bestiary train`: {' '.join(words)}")
    if stop.received:
        print(f"stopped; the same command with --run {root} goes on")
        return 128 + stop.received
    return 0


def read(args: list[str]) -> SweepCommand:
    """PRESET, what is changed of it, and how to search."""
    name, rest = args[0], args[1:]
    return parse(SweepCommand, check_parts(rest), f"bestiary sweep {name}", SweepCommand(preset(name)))


def print_best(told: "list[Told]", metric: str) -> None:
    counts = {state: sum(t.state == state for t in told) for state in ("complete", "pruned", "failed", "running")}
    names = {"complete": "finished", "pruned": "stopped early", "failed": "failed", "running": "to go on"}
    title = ", ".join(f"{n} {names[state]}" for state, n in counts.items() if n)
    table = Table(title=f"trials: {title}", title_justify="left", box=None)
    settings = max((list(trial.values) for trial in told), key=len, default=[])
    last = [name.rpartition(".")[2] for name in settings]
    short = [end if last.count(end) == 1 else name for name, end in zip(settings, last, strict=True)]
    for column in ("trial", metric, "seeds", *short):
        table.add_column(column, justify="right", no_wrap=column == "seeds", overflow="fold")
    for trial in [t for t in told if t.state == "complete"][:SHOWN]:
        seeds = ", ".join(f"{value:.2f}" for value in trial.seeds.values())
        values = [f"{v:.3g}" if isinstance(v, float) else as_text(v) for v in trial.values.values()]
        table.add_row(str(trial.number), f"{trial.value:.3f}", seeds, *values)
    Console().print(table)
