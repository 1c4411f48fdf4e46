"""An experiment: every number that decides a result, as one value that survives a trip through JSON."""

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bestiary.algos import AlgoConfig, Impala
from bestiary.algos.base import check_command
from bestiary.config.schema import Command, Count, Counts, decode, differences, encode, kebab, members
from bestiary.cores import CoreConfig, Ff
from bestiary.envs import Atari, Catch, EnvConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.runtime.config import Local, RuntimeConfig
from bestiary.types import Mode


@dataclass(frozen=True)
class Evaluation:
    """Games on seeds never trained on."""

    every: Count | None = None
    """frames between evaluations; None: only at the end"""
    episodes: int = 20
    """whole games per evaluation; 0: never evaluate"""
    background: bool = False
    """play in a thread of its own while training goes on; one that is due while the last still plays is left out"""
    mode: Mode = "greedy"
    """play the best action, or one drawn from the policy; `best` is the checkpoint that does this best"""
    epsilon: float = 0.0
    """chance of an action at random in evaluation games"""
    command: Command = ()
    """what an agent that follows commands is told to reach in evaluations and films; own: what it asks of itself"""
    lives: Literal["as trained", "all", "one"] = "as trained"
    """of an Atari game: play it to its end (all), or until the first life is lost (one)"""

    def __post_init__(self) -> None:
        if self.episodes < 0 or (self.every is not None and self.every < 1):
            raise UserError("evaluation.episodes must be at least 0 and evaluation.every at least 1 frame")
        if not 0 <= self.epsilon <= 1:
            raise UserError(f"evaluation.epsilon={self.epsilon} must lie in [0, 1]")


@dataclass(frozen=True)
class Checkpoints:
    """When to save. Whatever happens, at most the time since the last save is lost."""

    minutes: float = 10.0
    frames: Count | None = None
    """also save every so many frames"""
    milestones: Counts = ()
    """frames at which to keep a checkpoint for good, for example 50M,200M"""
    keep: int = 3
    """how many of the latest to keep"""
    best: int = 1
    """how many of the best by evaluation to keep"""
    replay: bool | None = None
    """save what was played with the latest, so that a run goes on exactly; None: up to 1 GiB"""

    def __post_init__(self) -> None:
        if self.keep < 1 or self.best < 1:
            raise UserError(f"checkpoint.keep={self.keep} and checkpoint.best={self.best} must be at least 1")
        if self.minutes <= 0 or (self.frames is not None and self.frames < 1):
            raise UserError("checkpoint.minutes and checkpoint.frames must be positive")


@dataclass(frozen=True)
class Logs:
    every: Count | None = None
    """frames per row of metrics.csv; None: a thousandth of the budget"""
    tensorboard: bool = True
    wandb: bool = False
    """also log to Weights & Biases (extra: wandb)"""
    wandb_project: str = "bestiary"


@dataclass(frozen=True)
class Video:
    """Greedy games on film while it learns: RUN/videos/FRAMES.mp4 (extra: video). Learning does not notice."""

    every: Count | None = None
    """frames between videos, with one more at the end; None: no videos"""
    episodes: int = 1
    """whole games per video"""
    fps: float | None = None
    """steps a second; None: what the environment is meant to be seen at"""

    def __post_init__(self) -> None:
        if self.episodes < 1 or (self.every is not None and self.every < 1):
            raise UserError("video.episodes must be at least 1, and video.every at least 1 frame")
        if self.fps is not None and self.fps <= 0:
            raise UserError(f"video.fps={self.fps} must be positive")


@dataclass(frozen=True)
class Experiment:
    env: EnvConfig = field(default_factory=Catch)
    algo: AlgoConfig = field(default_factory=Impala)
    core: CoreConfig = field(default_factory=Ff)
    net: Net = field(default_factory=Net)
    runtime: RuntimeConfig = field(default_factory=Local)
    frames: Count = 200_000
    """budget of experience in environment frames (agent steps x frame skip)"""
    seed: int = 0
    init: str | None = None
    """a run of the same algorithm and network to begin with: what it has learnt, without its experience"""
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    log: Logs = field(default_factory=Logs)
    video: Video = field(default_factory=Video)

    def __post_init__(self) -> None:
        if self.frames < 1:
            raise UserError(f"frames={self.frames} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must lie between 0 and 2**63 - 1")
        if self.evaluation.lives != "as trained" and not isinstance(self.env, Atari):
            raise UserError(
                f"evaluation.lives={self.evaluation.lives!r} is for Atari games: "
                f"leave it 'as trained' with env:{kebab(type(self.env))}"
            )
        if self.evaluation.command:
            check_command(self.algo, self.evaluation.command, "--evaluation.command")
        self.algo.replay_builder(self.runtime.streams).share(
            *self.runtime.shards_and_learners
        )  # refuses a batch that can never be filled

    def to_json(self) -> str:
        return json.dumps(encode(self), indent=2)

    @staticmethod
    def from_json(text: str) -> "Experiment":
        return decode(Experiment, json.loads(text))

    def differs_from(self, other: "Experiment") -> list[str]:
        """What makes the results of two experiments incomparable.

        How long, where and how often to log, save or film may change when a run goes on; the rest may not.
        """
        free = {"frames", "runtime", "evaluation", "checkpoint", "log", "video"}
        mine, theirs = ({k: v for k, v in encode(e).items() if k not in free} for e in (self, other))
        return differences(theirs, mine)


def family(name: str) -> dict[str, type]:
    """The parts one can choose for a field of Experiment: `family("core")` -> {"ff": Ff, "lstm": Lstm, ...}."""
    hint = typing.get_type_hints(Experiment, include_extras=True)[name]
    return {kebab(cls): cls for cls in members(hint)}


def register(**parts: type) -> None:
    """Add your own part: `bestiary.register(core=MyCore)`. It gets a name, flags and a place in experiment.json."""
    for name, cls in parts.items():
        if name not in ("env", "algo", "core", "runtime"):
            raise UserError(f"cannot register {name!r}: parts are env, algo, core and runtime")
        if not dataclasses.is_dataclass(cls):
            raise UserError(f"{cls.__name__} must be a frozen dataclass")
        if kebab(cls) in family(name):
            if family(name)[kebab(cls)] is cls:
                continue
            raise UserError(f"there is already a {name} called {kebab(cls)!r}")
        Experiment.__annotations__[name] = Experiment.__annotations__[name] | cls


def load_experiment(path: Path) -> Experiment:
    try:
        return Experiment.from_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} is not a run: it has no {path.name}") from None
    except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
