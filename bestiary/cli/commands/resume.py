"""bestiary resume RUN: continue from the last checkpoint, or from the one named."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.cli.commands.train import restarts_of, run_session
from bestiary.cli.parse import parse
from bestiary.config.plugins import load_plugins, plugin_args
from bestiary.config.schema import Count
from bestiary.runtime.ray.supervisor import supervise
from bestiary.training.display import PlainDisplay, choose_display
from bestiary.training.run import Run


@dataclass(frozen=True)
class Resume:
    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    frames: Count | None = None
    """a new frame budget, to train longer than first planned"""
    checkpoint: str | None = None
    """frames of the checkpoint to continue from; None: the last"""
    plain: bool = False
    """plain lines even on a terminal"""


def main(args: list[str]) -> int:
    load_plugins()
    chosen = parse(Resume, args, "bestiary resume")
    run = Run(chosen.run)
    experiment = run.experiment()
    begun = chosen.checkpoint is not None or run.saved()
    if begun:
        run.find(chosen.checkpoint)
    if chosen.frames is not None:
        experiment = replace(experiment, frames=chosen.frames)
    if restarts := restarts_of(experiment):
        longer = [] if chosen.frames is None else ["--frames", str(chosen.frames)]
        plain = ["--plain"] if chosen.plain else []
        again = ["resume", str(run.path), *longer, *plain, *plugin_args()]  # from the last, whichever was named first
        return supervise(["resume", *args, *plugin_args()], run.path, restarts, again)
    display = PlainDisplay() if chosen.plain else choose_display()
    # stopped before its first checkpoint: from the beginning
    return run_session(experiment, run.path, display, (chosen.checkpoint or "last") if begun else None)
