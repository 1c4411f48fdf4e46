"""bestiary video RUN: record episodes of a run's agent as a video."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from bestiary.cli.parse import FLAT, check_parts, parse
from bestiary.config.plugins import load_plugins
from bestiary.envs.base import for_evaluation
from bestiary.errors import UserError
from bestiary.training.run import EXPERIMENT, Run
from bestiary.training.video import VideoSettings, number, video


@dataclass(frozen=True)
class VideoCommand:
    """Record episodes of a run's agent: the rendered environment, and score, step, action and command below it."""

    run: Annotated[Path, tyro.conf.Positional]
    """run directory"""
    settings: Annotated[VideoSettings, FLAT] = field(default_factory=VideoSettings)


def main(args: list[str]) -> int:
    load_plugins()
    cfg = read(args)
    recorded = video(cfg.run, **vars(cfg.settings))
    scores = ", ".join(number(e.score) for e in recorded.episodes)
    print(f"score{'s' if len(recorded.episodes) > 1 else ''} {scores}")
    print(f"written to {recorded.file}")
    return 0


def read(args: list[str]) -> VideoCommand:
    """Parse arguments. The environment's settings default to those of the run."""
    runs = [Path(word) for word in args if Path(word, EXPERIMENT).is_file()]
    if not runs and any(word.startswith(("--env.", "env:")) for word in args):
        raise UserError("--env.* changes the environment of a run, but no argument is a run directory")
    default = VideoCommand(runs[0], VideoSettings(env=for_evaluation(Run(runs[0]).experiment().env))) if runs else None
    return parse(VideoCommand, check_parts(args), "bestiary video", default)
