"""bestiary video RUN: whole games on fresh seeds, to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bestiary.cli.parse import check_parts, parse
from bestiary.config.plugins import load_plugins
from bestiary.config.schema import parse_command
from bestiary.envs import EnvConfig
from bestiary.envs.base import for_evaluation
from bestiary.errors import UserError
from bestiary.training.run import EXPERIMENT, Run
from bestiary.types import Mode


@dataclass(frozen=True)
class Settings:
    """Film whole games of a run's agent: the picture, and beneath it score, step, action and command."""

    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    out: Path | None = None
    """a file that ends in .mp4; None: into the run directory"""
    episodes: int = 1
    """whole games, one after the other"""
    mode: Mode = "greedy"
    checkpoint: str | None = None
    """frames of a checkpoint, last or best; None: last"""
    seed: int = 0
    """of the games; never one of training's"""
    fps: float | None = None
    """steps a second; None: what the environment is meant to be seen at"""
    scale: int | None = None
    """pixels per pixel; None: as many as make small pictures visible"""
    epsilon: float = 0.0
    """chance that an action is replaced by one at random"""
    command: str | None = None
    """what an agent that follows commands is told to reach: a return, and in how many moves: 200,300; own: what it asks
    of itself; None: as the run was evaluated"""
    device: str = "auto"
    env: EnvConfig | None = None
    """where to play, if not where it was trained: --env.length 100"""


def main(args: list[str]) -> int:
    load_plugins()
    cfg = read(args)
    from bestiary.training.video import number, video

    options: dict[str, Any] = dict(vars(cfg))
    if cfg.command is not None:
        options["command"] = parse_command(cfg.command)
    filmed = video(**options)
    scores = ", ".join(number(e.score) for e in filmed.games)
    print(f"score{'s' if len(filmed.games) > 1 else ''} {scores}")
    print(f"written to {filmed.file}")
    return 0


def read(args: list[str]) -> Settings:
    """Settings of the environment are those of the run, unless changed."""
    runs = [Path(word) for word in args if Path(word, EXPERIMENT).is_file()]
    if not runs and any(word.startswith(("--env.", "env:")) for word in args):
        raise UserError("--env.* plays a run elsewhere than it was trained: none of the words is a run directory")
    default = Settings(runs[0], env=for_evaluation(Run(runs[0]).experiment().env)) if runs else None
    return parse(Settings, check_parts(args), "bestiary video", default)
