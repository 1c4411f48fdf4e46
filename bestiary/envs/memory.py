"""Settings of the memory tasks of Ni et al. (2023). Their compiled rules are imported when an environment is made."""

from dataclasses import dataclass
from typing import Literal, get_args

from bestiary.config.suggestions import did_you_mean
from bestiary.envs.base import References
from bestiary.envs.batched import VectorEnvBatch
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError
from bestiary.seeding import derive

Colours = Literal["per_episode", "per_run", "upstream"]


def check_length(task: str, length: int) -> None:
    if length < 1:
        raise UserError(f"{task} needs a length of at least 1, not {length}")


def check_colours(colours: str) -> None:
    if colours not in get_args(Colours):
        raise UserError(f"there is no colours={colours!r}: {did_you_mean(colours, get_args(Colours))}")


@dataclass(frozen=True)
class TMaze:
    """T-Maze (Bakker 2001): a cue at the start of a corridor tells which way to turn at its end."""

    length: int = 50
    """corridor length in steps, which is how long the cue must be remembered (Ni et al. 2023: 50 to 1500)"""
    active: bool = False
    """active T-Maze: the cue lies one step to the left of the start, and the agent must go there to see it"""
    oracle: bool = False
    """show the goal at every step; an agent without memory then reaches what a perfect memory could"""

    def __post_init__(self) -> None:
        check_length("T-Maze", self.length)

    @property
    def references(self) -> References:
        return References("score", 1.0, 0.5)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        from bestiary.envs.tmaze import TMazeEnv

        env = TMazeEnv(num_envs, self.length, self.active, self.oracle)
        return VectorEnvBatch("TMazeActive" if self.active else "TMazePassive", env, seed, stream)


@dataclass(frozen=True)
class VisualMatch:
    """Passive Visual Match (Hung et al. 2019): remember a colour past apples and enter its door."""

    length: int = 60
    """steps of the apple phase, which is how long the colour must be remembered (Ni et al. 2023: 60 to 1000)"""
    colours: Colours = "per_episode"
    """when door colours are sampled: per_episode, per_run, or upstream (once per EnvBatch, as published)"""
    oracle: bool = False
    """show the colour at every step; an agent without memory then reaches what a perfect memory could"""

    def __post_init__(self) -> None:
        check_length("Visual Match", self.length)
        check_colours(self.colours)

    @property
    def references(self) -> References:
        return References("success", 1.0, 1 / 3)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        from bestiary.envs.visual_match import VisualMatchEnv

        colour_seed = derive(seed) if self.colours == "per_run" else derive(seed, stream)
        env = VisualMatchEnv(num_envs, self.length, self.colours, colour_seed, self.oracle)
        return VectorEnvBatch("VisualMatch", env, seed, stream)


@dataclass(frozen=True)
class KeyToDoor:
    """Key-to-Door (Hung et al. 2019): a key taken in the first phase opens a door after the apple phase."""

    length: int = 60
    """steps of the apple phase, which is the delay between the key and its reward (Ni et al. 2023: 60 to 500)"""
    oracle: bool = False
    """show at every step whether the agent holds the key"""

    def __post_init__(self) -> None:
        check_length("Key-to-Door", self.length)

    @property
    def references(self) -> References:
        return References("success", 1.0, 0.0)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        from bestiary.envs.key_to_door import KeyToDoorEnv

        return VectorEnvBatch("KeyToDoor", KeyToDoorEnv(num_envs, self.length, self.oracle), seed, stream)
