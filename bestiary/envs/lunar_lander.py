"""LunarLander: come down between the flags, gently and with little fuel; the reward at every move or all at the end."""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.config.extras import MissingExtra, available, require
from bestiary.config.suggestions import did_you_mean
from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.envs.gym import Gym, GymEnvBatch
from bestiary.errors import UserError
from bestiary.seeding import derive
from bestiary.types import Spec

ID = "LunarLander-v3"
MOVES = 1000  # of the longest game
VERDICT = 100.0  # points: what a crash costs and a landing pays, instead of everything else that move would
Backend = Literal["gymnasium", "envpool"]


class Sparse(gymnasium.Wrapper):
    """The whole return is paid with the move that ends an episode."""

    owed = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.owed = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.owed += float(reward)
        return obs, self.owed if terminated or truncated else 0.0, terminated, truncated, info


class EnvpoolEnvBatch(EnvBatch):
    """All games in one pool of C++ threads.

    A slot draws all its games from the one stream it was seeded with, and the pool cannot be saved.
    """

    resumable = False

    def __init__(self, cfg: "LunarLander", num_envs: int, seed: int, stream: int, threads: int) -> None:
        if not available("envpool"):
            hint = 'pip install "bestiary[envpool]", or use --env.backend gymnasium'
            raise MissingExtra(f'env.backend=envpool needs the extra "envpool": {hint}')
        require("Box2D", "box2d")  # evaluations are played in Gymnasium: better told now than at the first of them
        moves = cfg.limit or MOVES
        super().__init__(Spec(ID, (8,), torch.float32, 4, horizon=moves), num_envs)
        self.sparse = cfg.sparse
        self.options = {
            "num_envs": num_envs,
            "seed": [derive(seed, stream, slot) for slot in range(num_envs)],  # of one seed it would take the next ones
            "num_threads": min(threads, num_envs),
            "max_episode_steps": moves,
        }
        self.pool: Any = None
        self._ended = np.zeros(num_envs, bool)
        self._owed = np.zeros(num_envs)

    def _start(self) -> VectorStep:
        import envpool

        self.pool = envpool.make(ID, "gymnasium", **self.options)  # seeds are given once: only a new pool starts anew
        obs, _ = self.pool.reset()
        none = np.zeros(self.num_envs, bool)
        self._ended, self._owed = none, np.zeros(self.num_envs)
        return VectorStep(obs, np.zeros(self.num_envs), none, none, ~none)

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        is_first = self._ended
        obs, reward, terminated, truncated, _ = self.pool.step(action)
        self._ended = terminated | truncated
        # for envpool whatever ends on the last move of all was cut short, a crash too
        terminated = terminated | (truncated & (np.abs(reward) == VERDICT))
        if self.sparse:
            self._owed = np.where(is_first, 0.0, self._owed + reward)
            reward = np.where(self._ended, self._owed, 0.0)
        return VectorStep(obs, reward, terminated, truncated & ~terminated, is_first)

    def close(self) -> None:
        self.pool = None  # its threads end with it


@dataclass(frozen=True)
class LunarLander:
    """Land between two flags: eight numbers, four actions, 200 points and more are a solution (extra: box2d)."""

    sparse: bool = False
    """the whole return is paid with the last row of an episode, and nothing before"""
    limit: int | None = None
    """moves after which an episode is cut short, which is not an end; None: the game's own 1000"""
    backend: Backend = "gymnasium"
    """envpool plays the same game in C++ (extra: envpool), but cannot save one under way: resuming begins new ones"""
    processes: bool = False
    """gymnasium only: share the environments out among processes, one per thread (unless set: per core)"""

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            hint = did_you_mean(self.backend, get_args(Backend))
            raise UserError(f"there is no env.backend={self.backend!r}: {hint}")
        if self.limit is not None and not 1 <= self.limit <= MOVES:
            raise UserError(f"env.limit={self.limit} must lie between 1 and {MOVES}, which is the game's own")
        if self.processes and self.backend == "envpool":
            raise UserError("env.processes is for env.backend=gymnasium: envpool has threads of its own")

    def for_evaluation(self) -> "LunarLander":
        """The game as published, whatever made training quicker."""
        return replace(self, limit=None, backend="gymnasium", processes=False)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        if self.backend == "envpool":
            return EnvpoolEnvBatch(self, num_envs, seed, stream, threads)
        game = Gym(ID, {"max_episode_steps": self.limit or MOVES}, self.processes)
        return GymEnvBatch(game, num_envs, seed, stream, threads, Sparse if self.sparse else None)
