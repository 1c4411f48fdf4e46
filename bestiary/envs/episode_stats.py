"""Episode statistics: the float64 return, length, lives and reward components of every running episode."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bestiary.types import Episode, Snapshot


class EpisodeStats:
    """Accumulates rewards per slot and makes an `Episode` of what has accumulated when an episode is over.

    `frames_per_step` converts agent steps to environment frames. `components` names the reward components that are
    recorded beside the reward.
    """

    def __init__(self, num_envs: int, frames_per_step: int, components: tuple[str, ...]) -> None:
        self.frames_per_step = frames_per_step
        self.components = components
        self.score = np.zeros(num_envs)  # undiscounted return of the episode so far
        self.life_return = np.zeros(num_envs)
        self.steps = np.zeros(num_envs, np.int64)
        self.life_steps = np.zeros(num_envs, np.int64)
        self.truncated = np.zeros(num_envs, bool)
        self.success: NDArray[np.bool_] | None = None
        self.lives: NDArray[Any] | None = None  # lives left; None where the environment has none
        self.past_lives: list[list[float]] = [[] for _ in range(num_envs)]  # returns of the lives already lost
        self.component_sums = np.zeros((num_envs, len(components)))
        self.life_component_sums = np.zeros((num_envs, len(components)))
        self.past_life_components: list[list[list[float]]] = [[] for _ in range(num_envs)]
        self.interval = np.zeros(1 + len(components))  # steps and component sums since the last `component_means`

    def start(self, lives: NDArray[Any] | None) -> None:
        """All environments have been reset."""
        self._reset(np.ones(len(self.score), bool))
        self.lives = None if lives is None else lives.copy()
        self.success = None

    def finish(self, mask: NDArray[np.bool_]) -> list[Episode]:
        """The episodes of the slots in `mask`, which are over; these slots start again from zero."""
        episodes = [self._episode(int(slot)) for slot in np.flatnonzero(mask)]
        self._reset(mask)
        return episodes

    def add(
        self,
        reward: NDArray[Any],
        stepped: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        success: NDArray[np.bool_] | None,
        lives: NDArray[Any] | None,
        components: NDArray[np.float64] | None,
    ) -> None:
        """Add one vector step; `stepped` is false where the step was a reset."""
        self.score += np.where(stepped, reward, 0.0)
        self.life_return += np.where(stepped, reward, 0.0)
        self.steps += stepped
        self.life_steps += stepped
        self.truncated = truncated & stepped
        self.success = success
        if components is not None:
            masked = components * stepped[:, None]
            self.component_sums += masked
            self.life_component_sums += masked
            # another thread may call `component_means`, which replaces the array: this must not assign the old one
            interval = self.interval
            interval += (stepped.sum(), *masked.sum(0))
        if lives is not None:
            assert self.lives is not None
            for slot in np.flatnonzero(stepped & (lives < self.lives)):
                self._end_life(int(slot))
                self.life_return[slot] = self.life_steps[slot] = 0
                self.life_component_sums[slot] = 0
            self.lives = lives.copy()

    def add_block(self, reward: NDArray[Any], truncated: NDArray[np.bool_], success: NDArray[np.bool_] | None) -> None:
        """Add vector steps [n, B] without resets, lives and components; the flags are those of the last step."""
        for total in (self.score, self.life_return):
            total[:] = np.cumsum(np.concatenate([total[None], reward]), 0)[-1]  # summed in the order of the steps
        self.steps += len(reward)
        self.life_steps += len(reward)
        self.truncated, self.success = truncated, success

    def component_means(self) -> dict[str, float]:
        """Mean of every reward component per step since the last call."""
        interval, self.interval = self.interval, np.zeros_like(self.interval)
        steps, *sums = interval.tolist()
        return {f"per_step_{name}": value / max(steps, 1) for name, value in zip(self.components, sums, strict=True)}

    def _reset(self, mask: NDArray[np.bool_]) -> None:
        self.score[mask] = self.life_return[mask] = 0.0
        self.steps[mask] = self.life_steps[mask] = 0
        self.component_sums[mask] = self.life_component_sums[mask] = 0.0
        for slot in np.flatnonzero(mask):
            self.past_lives[slot], self.past_life_components[slot] = [], []

    def _end_life(self, slot: int) -> None:
        self.past_lives[slot].append(float(self.life_return[slot]))
        self.past_life_components[slot].append(self.life_component_sums[slot].tolist())

    def _named(self, values: Iterable[float]) -> dict[str, float]:
        return dict(zip(self.components, map(float, values), strict=True))

    def _episode(self, slot: int) -> Episode:
        if self.life_steps[slot] > 0:  # the life that was in progress at the end of the episode
            self._end_life(slot)
        steps = int(self.steps[slot])
        return Episode(
            slot=slot,
            score=float(self.score[slot]),
            steps=steps,
            frames=steps * self.frames_per_step,
            life_returns=tuple(self.past_lives[slot]),
            truncated=bool(self.truncated[slot]),
            success=None if self.success is None else bool(self.success[slot]),
            components=self._named(self.component_sums[slot]),
            life_components=tuple(map(self._named, self.past_life_components[slot])) if self.components else (),
        )

    def state_dict(self) -> Snapshot:
        return {
            "score": self.score.tolist(),
            "life": self.life_return.tolist(),
            "steps": self.steps.tolist(),
            "life_steps": self.life_steps.tolist(),
            "truncated": self.truncated.tolist(),
            "past_lives": [list(x) for x in self.past_lives],
            "lives": None if self.lives is None else self.lives.tolist(),
            "success": None if self.success is None else self.success.tolist(),
            "components": self._component_state() if self.components else None,
        }

    def _component_state(self) -> list[Any]:
        past = [list(x) for x in self.past_life_components]
        return [self.component_sums.tolist(), self.life_component_sums.tolist(), past, self.interval.tolist()]

    def load_state_dict(self, state: Snapshot) -> None:
        self.score = np.array(state["score"])
        self.life_return = np.array(state["life"])
        self.steps = np.array(state["steps"], np.int64)
        self.life_steps = np.array(state["life_steps"], np.int64)
        self.truncated = np.array(state["truncated"], bool)
        self.past_lives = [list(x) for x in state["past_lives"]]
        self.lives = None if state["lives"] is None else np.array(state["lives"])
        success = state.get("success")  # not in checkpoints of 0.1
        self.success = None if success is None else np.array(success, bool)
        if self.components:
            episode, life, past, interval = state["components"]
            self.component_sums, self.life_component_sums = np.array(episode), np.array(life)
            self.past_life_components = [list(x) for x in past]
            self.interval = np.array(interval)
