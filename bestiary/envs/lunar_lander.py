"""LunarLander: land between two flags, gently and with little fuel. The reward is dense or sparse."""

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
MAX_STEPS = 1000  # the time limit of the published environment
FINAL_REWARD = 100.0  # magnitude of the last reward: -100 for a crash, +100 for a landing
Backend = Literal["gymnasium", "envpool"]


class Sparse(gymnasium.Wrapper):
    """Sparse reward: the episode's return is given at its last step."""

    episode_return = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode_return = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.episode_return += float(reward)
        return obs, self.episode_return if terminated or truncated else 0.0, terminated, truncated, info


class EnvpoolEnvBatch(EnvBatch):
    """All environments in one pool of C++ threads.

    Every slot takes the initial states of all its episodes from one random stream. The pool cannot be saved.
    """

    resumable = False

    def __init__(self, cfg: "LunarLander", num_envs: int, seed: int, stream: int, threads: int) -> None:
        if not available("envpool"):
            hint = 'pip install "bestiary[envpool]", or use --env.backend gymnasium'
            raise MissingExtra(f'env.backend=envpool needs the extra "envpool": {hint}')
        require("Box2D", "box2d")  # evaluations run in Gymnasium: fail now rather than at the first of them
        limit = cfg.limit or MAX_STEPS
        super().__init__(Spec(ID, (8,), torch.float32, 4, horizon=limit), num_envs)
        self.sparse = cfg.sparse
        self.options = {
            "num_envs": num_envs,
            "seed": [derive(seed, stream, slot) for slot in range(num_envs)],  # not seed, seed + 1, ...
            "num_threads": min(threads, num_envs),
            "max_episode_steps": limit,
        }
        self.pool: Any = None
        self._ended = np.zeros(num_envs, bool)
        self._episode_return = np.zeros(num_envs)

    def _start(self) -> VectorStep:
        import envpool

        self.pool = envpool.make(ID, "gymnasium", **self.options)  # a pool is seeded once, so a reset needs a new pool
        obs, _ = self.pool.reset()
        none = np.zeros(self.num_envs, bool)
        self._ended, self._episode_return = none, np.zeros(self.num_envs)
        return VectorStep(obs, np.zeros(self.num_envs), none, none, ~none)

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        is_first = self._ended
        obs, reward, terminated, truncated, _ = self.pool.step(action)
        self._ended = terminated | truncated
        # envpool reports every episode that ends at the time limit as truncated, even a crash
        terminated = terminated | (truncated & (np.abs(reward) == FINAL_REWARD))
        if self.sparse:
            self._episode_return = np.where(is_first, 0.0, self._episode_return + reward)
            reward = np.where(self._ended, self._episode_return, 0.0)
        return VectorStep(obs, reward, terminated, truncated & ~terminated, is_first)

    def close(self) -> None:
        self.pool = None  # its threads end with it


@dataclass(frozen=True)
class LunarLander:
    """LunarLander-v3: 8 numbers, 4 actions; an average score of 200 counts as solved (extra: box2d)."""

    sparse: bool = False
    """sparse reward: the episode's return is given at its last step, and 0 before"""
    limit: int | None = None
    """time limit in steps, after which an episode is truncated; None: the environment's own limit of 1000"""
    backend: Backend = "gymnasium"
    """gymnasium, or envpool: the same environment in C++ (extra: envpool), whose episodes cannot be saved, so that a
    resumed run begins new ones"""
    processes: bool = False
    """gymnasium only: run the environments in several processes, one per thread (default: per CPU core)"""

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            hint = did_you_mean(self.backend, get_args(Backend))
            raise UserError(f"there is no env.backend={self.backend!r}: {hint}")
        if self.limit is not None and not 1 <= self.limit <= MAX_STEPS:
            raise UserError(f"env.limit={self.limit} must lie between 1 and {MAX_STEPS}, the environment's own limit")
        if self.processes and self.backend == "envpool":
            raise UserError("env.processes is for env.backend=gymnasium: envpool has threads of its own")

    def for_evaluation(self) -> "LunarLander":
        """The environment as published, without the settings that make training faster."""
        return replace(self, limit=None, backend="gymnasium", processes=False)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        if self.backend == "envpool":
            return EnvpoolEnvBatch(self, num_envs, seed, stream, threads)
        gym = Gym(ID, {"max_episode_steps": self.limit or MAX_STEPS}, self.processes)
        return GymEnvBatch(gym, num_envs, seed, stream, threads, Sparse if self.sparse else None)
