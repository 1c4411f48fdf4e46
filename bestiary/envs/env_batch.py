"""EnvBatch: a batch of environments that is stepped together and returns TimeSteps of tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.envs.episode_stats import EpisodeStats
from bestiary.errors import UserError
from bestiary.types import Episode, Snapshot, Spec, TimeStep


class VectorStep(NamedTuple):
    """One vector step of a backend, before it becomes a TimeStep; arrays are [B, ...]."""

    obs: NDArray[Any]
    reward: NDArray[Any]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    is_first: NDArray[np.bool_]  # this step was a reset
    lives: NDArray[Any] | None = None  # lives left, where the environment has lives
    success: NDArray[np.bool_] | None = None  # given at the last step of an episode, where success is defined
    components: NDArray[np.float64] | None = None  # [B, K] reward components of this step, where they are named


class EnvBatch:
    """TimeSteps of a batch of environments, and the statistics of their episodes.

    A backend implements `_start` (reset all), `_advance` (step all) and, unless it is not `resumable`, `_save` and
    `_restore`. Resets happen on the step after the last step of an episode (Gymnasium's NEXT_STEP autoreset), so the
    last observation is never lost. An episode is returned together with the first time step of the next one.
    """

    listener: "Callable[[NDArray[np.int64], VectorStep], None] | None" = None  # called with every action and its step
    resumable = True  # False: running episodes cannot be saved, and a resumed run begins new ones

    def __init__(self, spec: Spec, num_envs: int, components: tuple[str, ...] = ()) -> None:
        """`components` names reward components. They enter the episode statistics, never a TimeStep."""
        self.spec = spec
        self.num_envs = num_envs
        self.components = components
        self.stats = EpisodeStats(num_envs, spec.frames_per_step, components)

    # -- backend ---------------------------------------------------------------------------------

    def _start(self) -> VectorStep:
        raise NotImplementedError

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        raise NotImplementedError

    def _save(self) -> Snapshot:
        """What is needed to continue the running episodes exactly."""
        raise NotImplementedError

    def _restore(self, state: Snapshot) -> None:
        raise NotImplementedError

    def start_rendering(self) -> float:
        """Prepare for `render`; called before `reset`. Returns the natural playback speed in steps/s."""
        raise UserError(f"{self.spec.name} cannot be rendered")

    def render(self, slot: int) -> NDArray[np.uint8]:
        """The current frame of one environment for a human viewer: a new array [height, width, RGB]."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    # -- time steps ------------------------------------------------------------------------------

    def reset(self) -> TimeStep:
        step = self._start()
        self.stats.start(step.lives)
        return self._time_step(step, np.zeros(self.num_envs, np.int64))

    def step(self, action: torch.Tensor) -> tuple[TimeStep, list[Episode]]:
        actions = action.cpu().numpy()
        step = self._advance(actions)
        if self.listener is not None:
            self.listener(actions, step)
        return self._time_step(step, actions), self.record(step)

    def record(self, step: VectorStep) -> list[Episode]:
        """Add a step to the statistics; returns the episodes that ended before it."""
        episodes = self.stats.finish(step.is_first)
        self.stats.add(step.reward, ~step.is_first, step.truncated, step.success, step.lives, step.components)
        return episodes

    def record_without_resets(self, reward: NDArray[Any], last: VectorStep) -> None:
        """Add steps [n, B] in which no episode begins; `last` is the latest of them. For environments without lives."""
        self.stats.add_block(reward, last.truncated, last.success)

    def component_means(self) -> dict[str, float]:
        """Mean of every reward component per step since the last call."""
        return self.stats.component_means()

    def _time_step(self, step: VectorStep, action: NDArray[np.int64]) -> TimeStep:
        stepped = ~step.is_first
        return TimeStep(
            obs=torch.from_numpy(step.obs),
            prev_action=torch.from_numpy(np.where(stepped, action, 0)),
            reward=torch.from_numpy(np.where(stepped, step.reward, 0).astype(np.float32)),
            is_first=torch.from_numpy(step.is_first.copy()),
            is_terminal=torch.from_numpy(step.terminated & stepped),
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        return {**self.stats.state_dict(), "backend": self._save()}

    def load_state_dict(self, state: Snapshot) -> None:
        self._restore(state["backend"])
        self.stats.load_state_dict(state)
