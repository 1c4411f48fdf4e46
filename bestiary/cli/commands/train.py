"""bestiary train PRESET: train a new run, or resume it if the run directory has a checkpoint."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from bestiary.cli.parse import ExecutorName, Flat, check_parts, parse
from bestiary.config.experiment import Experiment
from bestiary.config.plugins import load_plugins, plugin_args
from bestiary.errors import UserError
from bestiary.launch.executor import choose_executor
from bestiary.presets import PRESETS, preset
from bestiary.runtime import Ray
from bestiary.runtime.ray.supervisor import is_supervised, supervise
from bestiary.training.display import Display, PlainDisplay, choose_display
from bestiary.training.run import Run, new_path
from bestiary.training.session import Session


@dataclass(frozen=True)
class Train:
    experiment: Flat
    run: Path | None = None
    """run directory; with --seeds it holds one run per seed (DIR/seed0, DIR/seed1 ...); None: a new one under runs/"""
    seeds: str | None = None
    """train several seeds in parallel: their number (5, from --seed on), a range (25..29) or a list (1,5,9)"""
    jobs: int | None = None
    """with --seeds: number of runs in parallel; None: one per core of this machine or of the cluster of --executor"""
    executor: ExecutorName = "local"
    """with --seeds: local: processes of this machine; ray[:ADDRESS]: jobs of a Ray cluster (auto or HOST:PORT)"""
    plain: bool = False
    """print plain lines instead of a dashboard, also on a terminal"""


def main(args: list[str]) -> int:
    load_plugins()
    if not args or args[0] in ("-h", "--help"):
        print("usage: bestiary train PRESET [part:choice ...] [--flags] [--seeds 5 [--executor ray]] [--run DIR]")
        print("\npresets:")
        print("\n".join(f"  {name:18} {text}" for name, (_, text) in PRESETS.items()))
        print("\n`bestiary train PRESET --help` lists every setting of a preset.")
        return 0 if args else 2
    chosen = read(args)
    if chosen.seeds is not None:
        return run_seeds(chosen, args[0])
    if chosen.executor != "local":
        raise UserError(
            f"--executor {chosen.executor} is for several runs: name their seeds with --seeds; runtime:ray spreads one"
        )
    if chosen.jobs is not None:
        raise UserError("--jobs is for several runs: name their seeds with --seeds")
    path = chosen.run or new_path(args[0], chosen.experiment.seed)
    if restarts := restarts_of(chosen.experiment):
        named = [] if chosen.run else ["--run", str(path)]
        return supervise(["train", *args, *named, *plugin_args()], path, restarts)
    return run_session(chosen.experiment, path, PlainDisplay() if chosen.plain else choose_display())


def read(args: list[str]) -> Train:
    """Parse the name of a preset and the changed settings."""
    name, rest = args[0], args[1:]
    return parse(Train, check_parts(rest), f"bestiary train {name}", Train(preset(name)))


def restarts_of(experiment: Experiment) -> int:
    """How often a lost run is restarted; 0: another process supervises this one already."""
    runtime = experiment.runtime
    return runtime.max_restarts if isinstance(runtime, Ray) and not is_supervised() else 0


class Signals:
    """Ctrl-C and SIGTERM request a stop at the next safe point; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        elif self.received:  # batch systems send SIGTERM twice
            return
        self.received = number
        print("\nstopping: saving a checkpoint ...", file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        return self.received != 0


def run_session(experiment: Experiment, path: Path, display: Display, checkpoint: str | None = None) -> int:
    stop = Signals()
    session = Session(experiment, path, display, stop, checkpoint)
    if session.runtime.frames >= experiment.frames:
        print(f"{path} has used its budget of {experiment.frames} frames; give --frames to train longer")
    for _ in session:
        pass
    if not session.finished:
        print(f"stopped at {session.runtime.frames} frames; continue with: bestiary resume {path}")
        return 128 + stop.received
    print_end(session.run)
    return 0


def run_seeds(chosen: Train, name: str) -> int:
    from bestiary.launch import seeds

    numbers = seeds.parse_seeds(chosen.seeds or "", chosen.experiment.seed)
    root = chosen.run or new_path(f"{name}-x{len(numbers)}", numbers[0])
    with choose_executor(chosen.executor) as executor:
        stop = Signals()
        result = seeds.train_seeds(
            chosen.experiment,
            numbers,
            root,
            chosen.jobs,
            log=lambda text: print(text, flush=True),
            stop=stop,
            executor=executor,
        )
    console = Console()
    console.print(seeds.table(result))
    console.print(f"written to {root / 'seeds.json'} and {root / 'seeds.csv'}", soft_wrap=True)
    if stop.received:
        print(f"stopped; the same command with --run {root} continues")
        return 128 + stop.received
    if failed := [f"seed {row['seed']}: {row['problem']}" for row in result["seeds"] if row["problem"]]:
        raise UserError(f"{len(failed)} of {len(numbers)} seeds failed, the first: {failed[0]}; --run {root} continues")
    print(f"  bestiary eval {root}           evaluate every seed, with intervals over seeds")
    print(f"  bestiary plot {root}           learning curve: mean over seeds with its confidence interval")
    return 0


def print_end(run: Run) -> None:
    print(f"\nresults are in {run.path}")
    print(f"  bestiary eval {run.path}          evaluate on fresh seeds, with confidence intervals")
    print(f"  tensorboard --logdir {run.path}   curves")
