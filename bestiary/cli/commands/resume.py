"""bestiary resume RUN: continue training from the last checkpoint, or from a given one."""

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
    """Continue training from a checkpoint."""

    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    frames: Count | None = None
    """new training budget in environment frames; None: as before"""
    checkpoint: str | None = None
    """frames of the checkpoint to continue from; None: the last"""
    plain: bool = False
    """print plain lines instead of a dashboard, also on a terminal"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(Resume, args, "bestiary resume")
    run = Run(cfg.run)
    experiment = run.experiment()
    has_checkpoint = cfg.checkpoint is not None or run.saved()
    if has_checkpoint:
        run.find(cfg.checkpoint)
    if cfg.frames is not None:
        experiment = replace(experiment, frames=cfg.frames)
    if restarts := restarts_of(experiment):
        longer = [] if cfg.frames is None else ["--frames", str(cfg.frames)]
        plain = ["--plain"] if cfg.plain else []
        again = [
            "resume",
            str(run.path),
            *longer,
            *plain,
            *plugin_args(),
        ]  # a restart continues from the last checkpoint
        return supervise(["resume", *args, *plugin_args()], run.path, restarts, again)
    display = PlainDisplay() if cfg.plain else choose_display()
    # a run that was stopped before its first checkpoint starts from the beginning
    return run_session(experiment, run.path, display, (cfg.checkpoint or "last") if has_checkpoint else None)
