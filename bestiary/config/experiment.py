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
    """Evaluations during training, on seeds that training never uses."""

    every: Count | None = None
    """frames between evaluations; None: only at the end"""
    episodes: int = 20
    """episodes per evaluation; 0: no evaluations"""
    background: bool = False
    """evaluate in a background thread while training continues; an evaluation that is due meanwhile is skipped"""
    mode: Mode = "greedy"
    """greedy: the best action; sampled: an action sampled from the policy; the `best` checkpoint is best at this"""
    epsilon: float = 0.0
    """probability that an action is replaced by a uniformly random one (DQN: 0.05)"""
    command: Command = ()
    """for return-conditioned agents: desired return and horizon in evaluations and videos, such as 200,300; own:
    commands as the agent learnt them"""
    lives: Literal["as trained", "all", "one"] = "as trained"
    """Atari: an episode is a full game (all), ends with the first lost life (one), or is as in training"""

    def __post_init__(self) -> None:
        if self.episodes < 0 or (self.every is not None and self.every < 1):
            raise UserError("evaluation.episodes must be at least 0 and evaluation.every at least 1 frame")
        if not 0 <= self.epsilon <= 1:
            raise UserError(f"evaluation.epsilon={self.epsilon} must lie in [0, 1]")


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are saved and how many are kept."""

    minutes: float = 10.0
    """minutes between checkpoints"""
    frames: Count | None = None
    """frames between checkpoints, besides those by time; None: by time only"""
    milestones: Counts = ()
    """frames at which a checkpoint is saved and never deleted, such as 50M,200M"""
    keep: int = 3
    """number of latest checkpoints that are kept"""
    best: int = 1
    """number of checkpoints with the best evaluation scores that are kept"""
    replay: bool | None = None
    """save the replay buffer with the latest checkpoint, which exact resume needs; None: if it is below 1 GiB"""

    def __post_init__(self) -> None:
        if self.keep < 1 or self.best < 1:
            raise UserError(f"checkpoint.keep={self.keep} and checkpoint.best={self.best} must be at least 1")
        if self.minutes <= 0 or (self.frames is not None and self.frames < 1):
            raise UserError("checkpoint.minutes and checkpoint.frames must be positive")


@dataclass(frozen=True)
class Logs:
    """What is logged besides the CSV files, and how often."""

    every: Count | None = None
    """logging interval: frames per row of metrics.csv; None: a thousandth of the frame budget"""
    tensorboard: bool = True
    """log to TensorBoard as well, in RUN/tensorboard"""
    wandb: bool = False
    """log to Weights & Biases as well (extra: wandb)"""
    wandb_project: str = "bestiary"
    """project name in Weights & Biases"""


@dataclass(frozen=True)
class Video:
    """Videos of greedy episodes during training, RUN/videos/FRAMES.mp4 (extra: video). They do not affect learning."""

    every: Count | None = None
    """frames between videos; one more is recorded at the end; None: no videos"""
    episodes: int = 1
    """episodes per video"""
    fps: float | None = None
    """steps shown per second; None: the environment's own speed"""

    def __post_init__(self) -> None:
        if self.episodes < 1 or (self.every is not None and self.every < 1):
            raise UserError("video.episodes must be at least 1, and video.every at least 1 frame")
        if self.fps is not None and self.fps <= 0:
            raise UserError(f"video.fps={self.fps} must be positive")


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run: a run directory keeps them in experiment.json."""

    env: EnvConfig = field(default_factory=Catch)
    algo: AlgoConfig = field(default_factory=Impala)
    core: CoreConfig = field(default_factory=Ff)
    net: Net = field(default_factory=Net)
    runtime: RuntimeConfig = field(default_factory=Local)
    frames: Count = 200_000
    """training budget in environment frames (agent steps x frame skip)"""
    seed: int = 0
    """seed of all random numbers"""
    init: str | None = None
    """run directory whose last checkpoint initialises the weights; it needs the same algorithm and network"""
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

        The frame budget, the runtime, evaluations, checkpoints, logs and videos may change when a run is resumed.
        """
        free = {"frames", "runtime", "evaluation", "checkpoint", "log", "video"}
        own, others = ({k: v for k, v in encode(e).items() if k not in free} for e in (self, other))
        return differences(others, own)


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
