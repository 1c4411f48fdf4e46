"""bestiary train PRESET: train, or continue if the run directory has a checkpoint."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bestiary.commands.parse import Flat, check_parts, load_plugins, parse
from bestiary.display import Lines, Screen, choose_screen
from bestiary.experiment import Experiment
from bestiary.presets import PRESETS, preset
from bestiary.run import Run, new_path
from bestiary.training import Session


@dataclass(frozen=True)
class Train:
    experiment: Flat
    run: Path | None = None
    """run directory; None: a new one under runs/"""
    plain: bool = False
    """plain lines even on a terminal"""


def main(args: list[str]) -> int:
    load_plugins()
    if not args or args[0] in ("-h", "--help"):
        print("usage: bestiary train PRESET [part:choice ...] [--flags] [--run DIR]\n\npresets:")
        print("\n".join(f"  {name:18} {text}" for name, (_, text) in PRESETS.items()))
        print("\n`bestiary train PRESET --help` lists every setting of a preset.")
        return 0 if args else 2
    chosen = read(args)
    path = chosen.run or new_path(args[0], chosen.experiment.seed)
    return run_session(chosen.experiment, path, Lines() if chosen.plain else choose_screen())


def read(args: list[str]) -> Train:
    """PRESET and what is changed of it."""
    name, rest = args[0], args[1:]
    return parse(Train, check_parts(rest), f"bestiary train {name}", Train(preset(name)))


class Signals:
    """Ctrl-C and SIGTERM ask for a stop at the next safe point; a second Ctrl-C insists."""

    def __init__(self) -> None:
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.default_int_handler(number, frame)
        self.received = number
        print("\nstopping: saving a checkpoint ...", file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        return self.received != 0


def run_session(experiment: Experiment, path: Path, screen: Screen, checkpoint: str | None = None) -> int:
    stop = Signals()
    session = Session(experiment, path, screen, stop, checkpoint)
    if session.runtime.frames >= experiment.frames:
        print(f"{path} has already seen its {experiment.frames} frames; give --frames to go further")
    for _ in session:
        pass
    if not session.finished:
        print(f"stopped at {session.runtime.frames} frames; continue with: bestiary resume {path}")
        return 128 + stop.received
    print_end(session.run)
    return 0


def print_end(run: Run) -> None:
    print(f"\nresults are in {run.path}")
    print(f"  bestiary eval {run.path}          whole games on fresh seeds, with intervals")
    print(f"  tensorboard --logdir {run.path}   curves")
