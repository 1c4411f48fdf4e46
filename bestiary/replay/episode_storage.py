"""Whole episodes in flat arrays, one after the other, and the table that says where each of them is."""
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.ops.commands import Floats
from bestiary.replay.ring_buffer import storage_like
from bestiary.types import TimeStep, Trajectory

Ints = NDArray[np.int64]
INITIAL_STEPS = 1024  # time steps for which there is room at first


class EpisodeTable(NamedTuple):
    """The episodes held, in order of arrival: one array per column."""

    number: Ints  # counts arrivals, so it never repeats
    start: Ints  # where the episode's first time step is stored
    length: Ints  # transitions
    episode_return: Floats  # undiscounted
    discounted_return: Floats  # of the first step
    truncated: NDArray[np.bool_]  # ended by a time limit
    rank_score: Floats  # decides which episodes are best, and how much an episode weighs

    def select(self, index: Any) -> "EpisodeTable":
        """The episodes at these indices, or where this mask is true."""
        return EpisodeTable._make(column[index] for column in self)

    def append(self, *values: Any) -> "EpisodeTable":
        return EpisodeTable._make(np.append(column, x) for column, x in zip(self, values, strict=True))

    @staticmethod
    def empty() -> "EpisodeTable":
        ints, floats = np.zeros(0, np.int64), np.zeros(0)
        return EpisodeTable(ints, ints, ints, floats, floats, np.zeros(0, bool), floats)


class EpisodeStorage:
    """Time steps, actions and weight versions of episodes in flat arrays. Every time step is stored once.

    An episode of n transitions has n + 1 time steps.
    """

    def __init__(self) -> None:
        self.arrays: Any = None  # tree of [size, ...]: time step, action, version
        self.used = 0  # time steps written, of episodes that are still held or not

    @property
    def size(self) -> int:
        return 0 if self.arrays is None else len(self.arrays[1])

    @property
    def reward(self) -> NDArray[np.float32]:
        return self.arrays[0].reward.numpy()

    @property
    def bytes(self) -> int:
        return 0 if self.arrays is None else self.used * tree.size(self.arrays) // self.size

    def write(self, episode: Any, compact: Callable[[int], None]) -> int:
        """Append an episode and return where it starts. `compact` makes room for so many time steps."""
        count = len(episode[1])
        if self.arrays is None:
            self.arrays = tree.map(lambda x: storage_like(INITIAL_STEPS, x[0]), episode)
        if self.used + count > self.size:
            compact(count)
        at = self.used
        tree.map(lambda store, x: store[at : at + count].copy_(x), self.arrays, episode)
        self.used += count
        return at

    def size_for(self, steps: int) -> int:
        """The smallest size that is at least twice as much as needed, by doubling."""
        size = self.size
        while size < 2 * steps:
            size *= 2
        return size

    def compact(self, kept: Ints, size: int) -> None:
        """Keep these time steps, in this order, and resize the arrays."""
        self.arrays = tree.map(lambda store: compacted(store, kept, size), self.arrays)
        self.used = len(kept)

    def gather(self, episodes: EpisodeTable, first: Ints, steps: int) -> Trajectory:
        """Time steps from number `first` of each episode on.

        Those before an episode's first and after its last time step are padded with one-step episodes.
        """
        wanted = first + np.arange(steps)[:, None]
        inside = np.clip(wanted, 0, episodes.length)
        at = torch.from_numpy(episodes.start + inside)
        step, action, version = tree.map(lambda store: store[at], self.arrays)
        outside = torch.from_numpy(wanted != inside)
        step = step._replace(is_first=step.is_first | outside)
        return Trajectory(step, action, {}, (), version[0])


def compacted(store: Tensor, kept: Ints, size: int) -> Tensor:
    """The kept entries of an array, with room for `size`."""
    fresh = storage_like(size, store[0])
    fresh[: len(kept)] = store[torch.from_numpy(kept)]
    return fresh


def concatenated_ranges(start: Ints, count: Ints) -> Ints:
    """[start[0], start[0] + 1, ... start[0] + count[0] - 1, start[1], ...]"""
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(int(count.sum()))


def sample_episodes(
    table: EpisodeTable,
    candidates: Ints,
    rng: np.random.Generator,
    count: int,
    by: Literal["episodes", "transitions"],
    extra: int = 0,
) -> Ints:
    """Sample indices among `candidates`: uniformly, or in proportion to their transitions plus `extra` each."""
    if by == "episodes":
        return candidates[rng.integers(len(candidates), size=count)]
    cumulative = np.cumsum(table.length[candidates] + extra)
    return candidates[np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")]


def to_plain(steps: Any) -> list[Any]:
    """Named tuples are saved as lists."""
    step, *rest = steps
    return [tuple(step), *rest]


def from_plain(steps: list[Any]) -> Any:
    step, *rest = steps
    return (TimeStep(*step), *rest)
