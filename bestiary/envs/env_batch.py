"""Gymnasium outside, TimeStep inside: many copies of one environment as rows."""

from collections.abc import Callable, Iterable
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
    components: NDArray[np.float64] | None = None  # [B, K] of this move, where a reward has named components


class EnvBatch:
    """Rows of TimeStep from a batch of environments, and the books of their episodes.

    A backend implements `_start`, `_advance` and, unless it is not `resumable`, `_save` and `_restore`. Resets happen
    on the step after the last row of an episode (Gymnasium's NEXT_STEP), so no last observation is ever lost.
    An episode is reported with the first row of the next one.
    """

    listener: "Callable[[NDArray[np.int64], Raw], None] | None" = None  # told every move, for whoever studies an agent
    resumable = True  # whether running episodes can be saved; where not, a resumed run begins new ones

    def __init__(self, spec: Spec, num_envs: int, components: tuple[str, ...] = ()) -> None:
        """`components`: names of what could be paid for. It is entered into the books, and never into a row."""
        self.spec = spec
        self.num_envs = num_envs
        self.components = components
        self._parts = np.zeros((num_envs, len(components)))
        self._life_parts = np.zeros((num_envs, len(components)))
        self._past_parts: list[list[list[float]]] = [[] for _ in range(num_envs)]
        self._tally = np.zeros(1 + len(components))  # moves, and what they added up to, since someone asked
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
        if self.listener is not None:
            self.listener(moved, raw)
        return self._row(raw, moved), self.record(raw)

    def record(self, raw: Raw) -> list[Episode]:
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
        if raw.components is not None:
            parts = raw.components * going[:, None]
            self._parts += parts
            self._life_parts += parts
            tally = self._tally  # whoever asks in another thread begins a new one: this must not put it back
            tally += (going.sum(), *parts.sum(0))
        if raw.lives is not None:
            assert self._lives is not None
            for slot in np.flatnonzero(going & (raw.lives < self._lives)):
                self._end_life(int(slot))
                self._life[slot] = self._life_steps[slot] = 0
                self._life_parts[slot] = 0
            self._lives = raw.lives.copy()
        return episodes

    def tally(self) -> dict[str, float]:
        """Mean of every component per move since the last time it was asked for."""
        tally, self._tally = self._tally, np.zeros_like(self._tally)
        moves, *sums = tally.tolist()
        return {f"per_step_{name}": value / max(moves, 1) for name, value in zip(self.components, sums, strict=True)}

    def record_quiet(self, reward: NDArray[Any], last: Raw) -> None:
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
        self._parts[mask] = self._life_parts[mask] = 0.0
        for slot in np.flatnonzero(mask):
            self._past_lives[slot], self._past_parts[slot] = [], []

    def _end_life(self, slot: int) -> None:
        self._past_lives[slot].append(float(self._life[slot]))
        self._past_parts[slot].append(self._life_parts[slot].tolist())

    def _named(self, parts: Iterable[float]) -> dict[str, float]:
        return dict(zip(self.components, map(float, parts), strict=True))

    def _close_book(self, slot: int) -> Episode:
        if self._life_steps[slot] > 0:  # the life in progress when the game ended
            self._end_life(slot)
        steps = int(self._steps[slot])
        return Episode(
            slot=slot,
            score=float(self._score[slot]),
            steps=steps,
            frames=steps * self.spec.frames_per_step,
            lives=tuple(self._past_lives[slot]),
            truncated=bool(self._truncated[slot]),
            success=None if self._success is None else bool(self._success[slot]),
            components=self._named(self._parts[slot]),
            life_components=tuple(map(self._named, self._past_parts[slot])) if self.components else (),
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
            "components": self._save_components() if self.components else None,
            "backend": self._save(),
        }

    def _save_components(self) -> list[Any]:
        past = [list(x) for x in self._past_parts]
        return [self._parts.tolist(), self._life_parts.tolist(), past, self._tally.tolist()]

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
        if self.components:
            game, life, past, tally = state["components"]
            self._parts, self._life_parts, self._past_parts = np.array(game), np.array(life), [list(x) for x in past]
            self._tally = np.array(tally)
