"""The memory tasks as settings. Their rules are compiled, and loaded only when one of them is made."""

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
    """A cue at the start of a corridor (or a step to its left: active) says where to turn at its end."""

    length: int = 50
    """of the corridor: how many steps the cue must be remembered"""
    active: bool = False
    """the cue is shown only to those who go and look"""
    oracle: bool = False
    """show the goal in every row: what an agent without memory then reaches is what memory could"""

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
    """A colour is shown, apples distract, then the door of that colour pays."""

    length: int = 60
    """steps among the apples: how long the colour must be remembered"""
    colours: Colours = "per_episode"
    """when the doors get their colours: anew in every episode, once a run, or once a world (as published)"""
    oracle: bool = False
    """show the colour in every row: what an agent without memory then reaches is what memory could"""

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
    """Take a key now, for a door that comes after the apples."""

    length: int = 60
    """steps among the apples: how far the key is from what it earns"""
    oracle: bool = False
    """show in every row whether the key is held"""

    def __post_init__(self) -> None:
        check_length("Key-to-Door", self.length)

    @property
    def references(self) -> References:
        return References("success", 1.0, 0.0)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        from bestiary.envs.key_to_door import KeyToDoorEnv

        return VectorEnvBatch("KeyToDoor", KeyToDoorEnv(num_envs, self.length, self.oracle), seed, stream)
