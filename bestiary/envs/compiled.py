"""BatchedEnv with rules compiled by Numba: the state is a structured array with one record per environment."""

from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from bestiary import seeding
from bestiary.config.suggestions import did_you_mean
from bestiary.envs.batched import BatchedEnv
from bestiary.errors import UserError
from bestiary.ops.jit import compiler
from bestiary.types import Snapshot

compiled = compiler()
mix = compiled(seeding.mix)

# the fields that every record begins with
HEAD: list[tuple[Any, ...]] = [("key", "u8"), ("episode", "i8"), ("ended", "?"), ("success", "?")]


@compiled
def random_int(s, index, n):
    """An integer in [0, n) for one record: equals `BatchedEnv._random_int` of that environment."""
    return np.int64(mix(mix(s.key, np.uint64(s.episode)), np.uint64(index)) % np.uint64(n))


class CompiledEnv(BatchedEnv):
    """Rules are compiled functions of one record `s`, so that compiled loops other than `step` can call them too.

    `sample_hidden(s)` samples the hidden variables of an episode, `initialize(s)` then sets its initial state, and
    `observe(s, obs)` writes one observation. `step_all(state, action, obs, reward, done)` steps all environments,
    resets included. `hidden` maps each variable that `reset(options=...)` may set to its shape.
    """

    metadata = {**BatchedEnv.metadata, "render_modes": ["rgb_array"], "render_fps": 8}
    hidden: ClassVar[dict[str, tuple[int, ...]]]
    oracle_return: ClassVar[float]  # return of a policy that knows the hidden variables (apples not counted)
    sample_hidden: Callable[..., Any]
    initialize: Callable[..., Any]
    observe: Callable[..., Any]
    step_all: Callable[..., Any]

    def __init__(
        self,
        fields: list[tuple[Any, ...]],
        settings: dict[str, int],
        observation_space: Box,
        num_envs: int,
        render_mode: str | None,
    ) -> None:
        """`fields` are the fields of the record; `settings` are the values of those that never change."""
        self.state = np.zeros(num_envs, np.dtype(HEAD + fields, align=True))
        self.settings = settings
        for name, value in settings.items():
            self.state[name] = value
        self.single_observation_space = observation_space
        self.single_action_space = Discrete(4)
        super().__init__(num_envs, render_mode)
        self.state["key"] = self._key
        self._key, self._episode, self._ended = (self.state[name] for name in ("key", "episode", "ended"))

    def _reset_slots(self, mask: NDArray[np.bool_]) -> None:
        for i in np.flatnonzero(mask):
            self.sample_hidden(self.state[i])
            self.initialize(self.state[i])

    def _empty(self) -> NDArray[Any]:
        space: gym.Space = self.single_observation_space
        assert space.shape is not None
        return np.empty((self.num_envs, *space.shape), space.dtype)

    def _observe(self) -> NDArray[Any]:
        obs = self._empty()
        for i in range(self.num_envs):
            self.observe(self.state[i], obs[i])
        return obs

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        forced = {name: self._checked(name, value) for name, value in (options or {}).items()}
        obs, info = super().reset(seed=seed)
        if not forced:
            return obs, info
        for name, values in forced.items():
            self.state[name] = values
        for i in range(self.num_envs):
            self.initialize(self.state[i])
        return self._observe(), info

    def _checked(self, name: str, value: Any) -> NDArray[np.int64]:
        """A reset option as an array [num_envs, ...]; raises UserError if it is invalid."""
        if name not in self.hidden:
            raise UserError(f"reset has no option {name!r}: {did_you_mean(name, self.hidden)}")
        values = np.asarray(value)
        if values.dtype.kind not in "iu":
            raise UserError(f"reset option {name} must hold whole numbers, not {values.dtype}")
        if values.ndim == 0 or len(values) != self.num_envs:
            entries = len(values) if values.ndim else "a single value"
            raise UserError(
                f"reset option {name} must have {self.num_envs} entries, one per environment, not {entries}"
            )
        if values.shape[1:] != self.hidden[name]:
            wanted, got = self.hidden[name], values.shape[1:]
            raise UserError(f"reset option {name} must have the shape {wanted} in each environment, not {got}")
        values = values.astype(np.int64)
        self._check(name, values)
        return values

    def _check(self, name: str, values: NDArray[np.int64]) -> None:
        """Raise UserError for values that no episode can have."""
        raise NotImplementedError

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], Any, Any, Any, dict[str, Any]]:
        n = self.num_envs
        obs, reward, done = self._empty(), np.empty(n), np.empty(n, bool)
        self.step_all(self.state, np.asarray(actions, np.int64), obs, reward, done)
        info: dict[str, Any] = {}
        if done.any():
            best = np.where(done, self.oracle_return, 0.0)
            info = {"success": self.state["success"] & done, "_success": done, "oracle": best, "_oracle": done}
        return obs, reward, done, np.zeros(n, bool), info

    def step_into(
        self,
        actions: NDArray[Any],
        obs: NDArray[Any],
        reward: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> NDArray[np.bool_] | None:
        self.step_all(self.state, actions, obs, reward, terminated)
        truncated[:] = False
        return self.state["success"] & terminated if terminated.any() else None

    def state_dict(self) -> Snapshot:
        names = [name for name in self.state.dtype.names or () if name not in self.settings]
        return {name: self.state[name].tolist() for name in names}

    def load_state_dict(self, state: Snapshot) -> None:
        for name, values in state.items():
            self.state[name] = np.array(values, self.state[name].dtype)
