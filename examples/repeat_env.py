"""An environment of your own: repeat the symbol that was shown some steps ago.

bestiary train recall --plugin examples/repeat_env.py env:repeat --algo.discount 0            # LSTM: all 19 points
bestiary train recall --plugin examples/repeat_env.py env:repeat --algo.discount 0 core:ff    # no memory: about half
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

import bestiary
from bestiary.envs.batched import BatchedEnv, VectorEnvBatch
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError


class RepeatEnv(BatchedEnv):
    """Every step shows a symbol; naming the one shown `lag` steps ago gives 1. An episode has `length` steps."""

    state_fields = ("symbols", "t")

    def __init__(
        self, num_envs: int = 1, lag: int = 1, length: int = 20, cues: int = 2, render_mode: str | None = None
    ) -> None:
        if not 0 <= lag < length or cues < 2:
            raise UserError(f"repeat needs 0 <= lag < length and at least 2 cues, not {lag}, {length} and {cues}")
        self.lag, self.length, self.cues = lag, length, cues
        self.single_observation_space = Box(0.0, 1.0, (cues,), np.float32)
        self.single_action_space = Discrete(cues)
        self.symbols = np.zeros((num_envs, length + 1), np.int64)
        self.t = np.zeros(num_envs, np.int64)
        super().__init__(num_envs, render_mode)

    def _reset_slots(self, mask: NDArray[np.bool_]) -> None:
        symbols = np.stack([self._random_int(self.cues, index) for index in range(self.length + 1)], 1)
        self.symbols = np.where(mask[:, None], symbols, self.symbols)
        self.t = np.where(mask, 0, self.t)

    def _symbol(self, t: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.symbols[np.arange(self.num_envs), np.clip(t, 0, self.length)]

    def _step(self, action: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        correct = (self.t >= self.lag) & (action == self._symbol(self.t - self.lag))
        self.t = self.t + 1
        terminated = self.t >= self.length
        return correct.astype(np.float64), terminated, np.zeros_like(terminated)

    def _observe(self) -> NDArray[np.float32]:
        return np.eye(self.cues, dtype=np.float32)[self._symbol(self.t)]


@dataclass(frozen=True)
class Repeat:
    """Name the symbol that was shown `lag` steps ago; without memory, 1/cues of the points."""

    lag: int = 1
    """steps between a symbol and the action that should name it"""
    length: int = 20
    """steps per episode"""
    cues: int = 2
    """number of different symbols, and of actions"""

    def __post_init__(self) -> None:
        RepeatEnv(1, self.lag, self.length, self.cues)  # checks the settings

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return VectorEnvBatch("Repeat", RepeatEnv(num_envs, self.lag, self.length, self.cues), seed, stream)


bestiary.register(env=Repeat)
