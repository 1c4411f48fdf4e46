"""The smallest memory task: a cue is shown once and asked for later."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from bestiary.envs.base import References
from bestiary.envs.batched import BatchedEnv, VectorEnvBatch
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError


class RecallEnv(BatchedEnv):
    """Row 0 shows one of `cues`; `delay` rows later a flag asks for it. Only that answer earns: 1 or 0.

    An agent without memory scores 1/cues. (Do not feed it its previous action: repeating the answer
    from the first row to the last would be a memory outside the network.)
    """

    metadata = {**BatchedEnv.metadata, "render_modes": ["rgb_array"], "render_fps": 8}
    state_fields = ("cue", "t")

    def __init__(self, num_envs: int = 1, delay: int = 10, cues: int = 4, render_mode: str | None = None) -> None:
        if delay < 1 or cues < 2:
            raise UserError(f"recall needs a delay of at least 1 and at least 2 cues, not {delay} and {cues}")
        self.delay, self.cues, self.horizon = delay, cues, delay + 1
        self.single_observation_space = Box(0.0, 1.0, (cues + 1,), np.float32)
        self.single_action_space = Discrete(cues)
        self.cue = np.zeros(num_envs, np.int64)
        self.t = np.zeros(num_envs, np.int64)
        super().__init__(num_envs, render_mode)

    def _begin(self, mask: NDArray[np.bool_]) -> None:
        self.cue = np.where(mask, self._draw(self.cues), self.cue)
        self.t = np.where(mask, 0, self.t)

    def _move(self, action: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        asked = self.t == self.delay
        self.t = self.t + 1
        return (asked & (action == self.cue)).astype(np.float64), asked, np.zeros_like(asked)

    def _observe(self) -> NDArray[np.float32]:
        obs = np.zeros((self.num_envs, self.cues + 1), np.float32)
        obs[np.arange(self.num_envs), self.cue] = self.t == 0
        obs[:, -1] = self.t == self.delay
        return obs

    def _picture(self, slot: int) -> NDArray[np.uint8]:
        """A lamp per cue, lit at the start; below it a mark for spectators, and a bar that fills until the question."""
        t, cue, size = int(self.t[slot]), int(self.cue[slot]), max(8, min(80, 640 // self.cues))
        picture = np.full((size + 100, size * self.cues, 3), 240, np.uint8)
        gap = size // 8
        for k in range(self.cues):
            lit = k == cue and t == 0
            picture[gap : size - gap, k * size + gap : (k + 1) * size - gap] = (228, 148, 109) if lit else 190
        picture[size : size + 6, cue * size + gap : (cue + 1) * size - gap] = (0, 130, 60)
        inner = picture[size + 40 : size + 70, gap:-gap]
        inner[:] = 204
        full = (60, 90, 150) if t < self.delay else (150, 60, 160)
        inner[:, : inner.shape[1] * min(t, self.delay) // self.delay] = full
        return picture


@dataclass(frozen=True)
class Recall:
    """A cue at the first step, asked for `delay` steps later; without memory: 1/cues."""

    delay: int = 10
    """steps between cue and question"""
    cues: int = 4

    def __post_init__(self) -> None:
        RecallEnv(1, self.delay, self.cues)  # refuses what it cannot be

    @property
    def references(self) -> References:
        return References("score", 1.0, 1 / self.cues)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return VectorEnvBatch("Recall", RecallEnv(num_envs, self.delay, self.cues), seed, stream)
