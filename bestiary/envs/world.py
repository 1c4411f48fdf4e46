"""Gymnasium outside, TimeStep inside: many copies of one environment as rows."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bestiary.errors import UserError
from bestiary.types import Episode, Snapshot, Spec, TimeStep


class Raw(NamedTuple):
    """One vector step as the environment tells it, arrays of [B, ...]."""

    obs: NDArray[Any]
    reward: NDArray[Any]
    terminal: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    is_first: NDArray[np.bool_]
    lives: NDArray[Any] | None = None
    success: NDArray[np.bool_] | None = None  # told with the rows that end an episode, where there is such a thing


class World:
    """Rows of TimeStep from a batch of environments, and the books of their episodes.

    A backend implements `_start`, `_advance` and, unless it is not `resumable`, `_save` and `_restore`. Resets happen
    on the step after the last row of an episode (Gymnasium's NEXT_STEP), so no last observation is ever lost.
    An episode is reported with the first row of the next one.
    """

    resumable = True  # whether running episodes can be saved; where not, a resumed run begins new ones

    def __init__(self, spec: Spec, num_envs: int) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self._score = np.zeros(num_envs)
        self._life = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)
        self._life_steps = np.zeros(num_envs, np.int64)
        self._truncated = np.zeros(num_envs, bool)
        self._past_lives: list[list[float]] = [[] for _ in range(num_envs)]
        self._lives: NDArray[Any] | None = None
        self._success: NDArray[np.bool_] | None = None

    # -- backend ---------------------------------------------------------------------------------

    def _start(self) -> Raw:
        raise NotImplementedError

    def _advance(self, action: NDArray[np.int64]) -> Raw:
        raise NotImplementedError

    def _save(self) -> Snapshot:
        """What is needed to continue the running episodes exactly."""
        raise NotImplementedError

    def _restore(self, state: Snapshot) -> None:
        raise NotImplementedError

    def watch(self) -> float:
        """Get ready for `render`, before the first row. Returns how many rows a second look natural."""
        raise UserError(f"{self.spec.name} has no picture to show")

    def render(self, slot: int) -> NDArray[np.uint8]:
        """What a spectator sees of one environment as it stands: a new array [height, width, RGB]."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    # -- rows ------------------------------------------------------------------------------------

    def reset(self) -> TimeStep:
        raw = self._start()
        self._open_books(np.ones(self.num_envs, bool))
        self._lives = None if raw.lives is None else raw.lives.copy()
        self._success = None
        return self._row(raw, np.zeros(self.num_envs, np.int64))

    def step(self, action: torch.Tensor) -> tuple[TimeStep, list[Episode]]:
        moved = action.cpu().numpy()
        raw = self._advance(moved)
        return self._row(raw, moved), self.settle(raw)

    def settle(self, raw: Raw) -> list[Episode]:
        """Enter a row into the books; the episodes that were over before it."""
        episodes = [self._close_book(int(slot)) for slot in np.flatnonzero(raw.is_first)]
        self._open_books(raw.is_first)

        going = ~raw.is_first
        self._score += np.where(going, raw.reward, 0.0)
        self._life += np.where(going, raw.reward, 0.0)
        self._steps += going
        self._life_steps += going
        self._truncated = raw.truncated & going
        self._success = raw.success
        if raw.lives is not None:
            assert self._lives is not None
            for slot in np.flatnonzero(going & (raw.lives < self._lives)):
                self._past_lives[slot].append(float(self._life[slot]))
                self._life[slot] = self._life_steps[slot] = 0
            self._lives = raw.lives.copy()
        return episodes

    def settle_quiet(self, reward: NDArray[Any], last: Raw) -> None:
        """Enter rows [n, B] in which no episode begins; `last` is the latest of them. There are no lives here."""
        for book in (self._score, self._life):
            book[:] = np.cumsum(np.concatenate([book[None], reward]), 0)[-1]  # one after the other, as rows come
        self._steps += len(reward)
        self._life_steps += len(reward)
        self._truncated, self._success = last.truncated, last.success

    def _row(self, raw: Raw, action: NDArray[np.int64]) -> TimeStep:
        going = ~raw.is_first
        return TimeStep(
            obs=torch.from_numpy(raw.obs),
            prev_action=torch.from_numpy(np.where(going, action, 0)),
            reward=torch.from_numpy(np.where(going, raw.reward, 0).astype(np.float32)),
            is_first=torch.from_numpy(raw.is_first.copy()),
            is_terminal=torch.from_numpy(raw.terminal & going),
        )

    # -- books: float64, whole games and single lives -----------------------------------------------

    def _open_books(self, mask: NDArray[np.bool_]) -> None:
        self._score[mask] = self._life[mask] = 0.0
        self._steps[mask] = self._life_steps[mask] = 0
        for slot in np.flatnonzero(mask):
            self._past_lives[slot] = []

    def _close_book(self, slot: int) -> Episode:
        lives = self._past_lives[slot]
        if self._life_steps[slot] > 0:  # the life in progress when the game ended
            lives = [*lives, float(self._life[slot])]
        steps = int(self._steps[slot])
        return Episode(
            slot=slot,
            score=float(self._score[slot]),
            steps=steps,
            frames=steps * self.spec.frames_per_step,
            lives=tuple(lives),
            truncated=bool(self._truncated[slot]),
            success=None if self._success is None else bool(self._success[slot]),
        )

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        return {
            "score": self._score.tolist(),
            "life": self._life.tolist(),
            "steps": self._steps.tolist(),
            "life_steps": self._life_steps.tolist(),
            "truncated": self._truncated.tolist(),
            "past_lives": [list(x) for x in self._past_lives],
            "lives": None if self._lives is None else self._lives.tolist(),
            "success": None if self._success is None else self._success.tolist(),
            "backend": self._save(),
        }

    def load_state_dict(self, state: Snapshot) -> None:
        self._restore(state["backend"])
        self._score = np.array(state["score"])
        self._life = np.array(state["life"])
        self._steps = np.array(state["steps"], np.int64)
        self._life_steps = np.array(state["life_steps"], np.int64)
        self._truncated = np.array(state["truncated"], bool)
        self._past_lives = [list(x) for x in state["past_lives"]]
        self._lives = None if state["lives"] is None else np.array(state["lives"])
        success = state.get("success")  # not in checkpoints of 0.1
        self._success = None if success is None else np.array(success, bool)
