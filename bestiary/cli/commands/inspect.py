"""bestiary inspect RUN: play an episode and draw what memory holds meanwhile."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.cli.parse import parse
from bestiary.config.plugins import load_plugins


@dataclass(frozen=True)
class Settings:
    """Play one greedy episode on a fresh seed; what was seen, done and earned, and memory's inside, as a picture."""

    run: Annotated[Path, tyro.conf.Positional]
    checkpoint: str | None = None
    """frames of the checkpoint to take; None: the latest"""
    seed: int = 0
    """another seed, another episode"""
    max_rows: int = 400
    """of the episode to show"""
    out: Path | None = None
    """where the picture goes; None: into the run directory"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(Settings, args, "bestiary inspect")
    from bestiary.analysis.inspect import inspect

    print(f"written to {inspect(cfg.run, cfg.checkpoint, cfg.seed, cfg.max_rows, cfg.out)}")
    return 0
