"""Catch (bsuite, Osband et al. 2020): a paddle catches a falling ball; the smallest task with image observations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from bestiary.envs.batched import BatchedEnv, VectorEnvBatch
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError


class CatchEnv(BatchedEnv):
    """The ball starts in a random column and falls one row per step; the paddle moves left, stays or moves right.

    The episode ends when the ball reaches the paddle's row: +1 if caught, -1 if not. A random policy scores about -0.6.
    """

    metadata = {**BatchedEnv.metadata, "render_modes": ["rgb_array"], "render_fps": 8}
    state_fields = ("ball_row", "ball_col", "paddle")

    def __init__(self, num_envs: int = 1, rows: int = 10, columns: int = 5, render_mode: str | None = None) -> None:
        if rows < 2 or columns < 2:
            raise UserError(f"catch needs a board of at least 2x2, not {rows}x{columns}")
        self.rows, self.columns, self.horizon = rows, columns, rows - 1
        self.single_observation_space = Box(0, 255, (1, rows, columns), np.uint8)
        self.single_action_space = Discrete(3)
        self.ball_row, self.ball_col, self.paddle = np.zeros((3, num_envs), np.int64)
        super().__init__(num_envs, render_mode)

    def _reset_slots(self, mask: NDArray[np.bool_]) -> None:
        self.ball_row = np.where(mask, 0, self.ball_row)
        self.ball_col = np.where(mask, self._random_int(self.columns), self.ball_col)
        self.paddle = np.where(mask, self.columns // 2, self.paddle)

    def _step(self, action: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        self.paddle = np.clip(self.paddle + action - 1, 0, self.columns - 1)
        self.ball_row = np.minimum(self.ball_row + 1, self.rows - 1)
        landed = self.ball_row == self.rows - 1
        reward = np.where(landed, np.where(self.paddle == self.ball_col, 1.0, -1.0), 0.0)
        return reward, landed, np.zeros_like(landed)

    def _observe(self) -> NDArray[np.uint8]:
        board = np.zeros((self.num_envs, 1, self.rows, self.columns), np.uint8)
        slots = np.arange(self.num_envs)
        board[slots, 0, self.ball_row, self.ball_col] = 255
        board[slots, 0, -1, self.paddle] = 255
        return board

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        size = max(4, min(32, 640 // max(self.rows, self.columns)))
        board = np.full((self.rows, self.columns, size, size, 3), 204, np.uint8)
        board[:, :, -1], board[:, :, :, -1] = 190, 190
        board[-1, self.paddle[slot], size // 4 :] = (60, 90, 150)
        inner, cell = slice(size // 4, -(size // 4)), (self.ball_row[slot], self.ball_col[slot])
        board[cell][inner, inner] = (228, 148, 109)
        return board.swapaxes(1, 2).reshape(self.rows * size, self.columns * size, 3)


@dataclass(frozen=True)
class Catch:
    """Catch: a paddle catches a falling ball; the reward is +1 or -1 at the end of the episode (image observations)."""

    rows: int = 10
    """height of the board in cells; an episode has rows - 1 steps (bsuite: 10)"""
    columns: int = 5
    """width of the board in cells (bsuite: 5)"""

    def __post_init__(self) -> None:
        CatchEnv(1, self.rows, self.columns)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return VectorEnvBatch("Catch", CatchEnv(num_envs, self.rows, self.columns), seed, stream)
