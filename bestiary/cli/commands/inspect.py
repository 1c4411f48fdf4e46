"""bestiary inspect RUN: draw one episode with the recurrent state of the agent."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.cli.parse import parse
from bestiary.config.plugins import load_plugins


@dataclass(frozen=True)
class InspectCommand:
    """Draw one greedy episode on a fresh seed: observations, actions, rewards and the agent's recurrent state."""

    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    checkpoint: str | None = None
    """frames of a checkpoint, or last, or best; None: last"""
    seed: int = 0
    """seed of the episode, which training never uses"""
    max_steps: int = 400
    """maximum number of steps that are plotted"""
    out: Path | None = None
    """image file; None: inspect-*.png in the run directory"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = parse(InspectCommand, args, "bestiary inspect")
    from bestiary.analysis.inspect import inspect

    print(f"written to {inspect(cfg.run, cfg.checkpoint, cfg.seed, cfg.max_steps, cfg.out)}")
    return 0
