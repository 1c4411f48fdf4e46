"""Recall: the smallest memory task. A cue is shown at the first step and must be repeated after a delay."""

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
    """Step 0 shows one of `cues`; `delay` steps later a flag asks for it. The reward is 1 for the right answer, else 0.

    An agent without memory scores 1/cues. (Do not feed the previous action to the network: an agent that repeats
    the answer from the first step to the last has a memory outside its core.)
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

    def _reset_slots(self, mask: NDArray[np.bool_]) -> None:
        self.cue = np.where(mask, self._random_int(self.cues), self.cue)
        self.t = np.where(mask, 0, self.t)

    def _step(self, action: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        is_question = self.t == self.delay
        self.t = self.t + 1
        return (is_question & (action == self.cue)).astype(np.float64), is_question, np.zeros_like(is_question)

    def _observe(self) -> NDArray[np.float32]:
        obs = np.zeros((self.num_envs, self.cues + 1), np.float32)
        obs[np.arange(self.num_envs), self.cue] = self.t == 0
        obs[:, -1] = self.t == self.delay
        return obs

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        """One lamp per cue, lit at step 0; below it a mark for the viewer, and a progress bar of the delay."""
        t, cue, size = int(self.t[slot]), int(self.cue[slot]), max(8, min(80, 640 // self.cues))
        image = np.full((size + 100, size * self.cues, 3), 240, np.uint8)
        gap = size // 8
        for k in range(self.cues):
            lit = k == cue and t == 0
            image[gap : size - gap, k * size + gap : (k + 1) * size - gap] = (228, 148, 109) if lit else 190
        image[size : size + 6, cue * size + gap : (cue + 1) * size - gap] = (0, 130, 60)
        inner = image[size + 40 : size + 70, gap:-gap]
        inner[:] = 204
        full = (60, 90, 150) if t < self.delay else (150, 60, 160)
        inner[:, : inner.shape[1] * min(t, self.delay) // self.delay] = full
        return image


@dataclass(frozen=True)
class Recall:
    """Recall: the agent repeats the cue of the first step `delay` steps later; score without memory: 1/cues."""

    delay: int = 10
    """number of steps between the cue and the question (at least 1)"""
    cues: int = 4
    """number of different cues, which is the number of actions (at least 2)"""

    def __post_init__(self) -> None:
        RecallEnv(1, self.delay, self.cues)  # its constructor checks the settings

    @property
    def references(self) -> References:
        return References("score", 1.0, 1 / self.cues)

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch:
        return VectorEnvBatch("Recall", RecallEnv(num_envs, self.delay, self.cues), seed, stream)
