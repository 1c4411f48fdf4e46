"""Environments whose rules are vectorised over the batch: the base class, and adapters to EnvBatch and gym.Env."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from bestiary.envs.env_batch import EnvBatch, VectorStep
from bestiary.errors import UserError
from bestiary.seeding import derive, hash64
from bestiary.types import Snapshot, Spec


class BatchedEnv(VectorEnv):
    """A native Gymnasium vector environment with NEXT_STEP autoreset.

    Subclasses set the two `single_` spaces, list the arrays that make up their state in `state_fields`
    ([num_envs, ...] each), and implement `_reset_slots`, `_step` and `_observe`. Random numbers come from
    `_random_int`, a hash of environment key and episode: episodes do not depend on the size of the batch.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
    state_fields: tuple[str, ...]
    horizon: int | None = None  # maximum episode length in steps, where it is known

    def __init__(self, num_envs: int = 1, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise UserError(f"render_mode={render_mode!r} must be {' or '.join(map(repr, [*modes, None]))}")
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._key = np.random.default_rng().integers(0, 2**63, num_envs).astype(np.uint64)
        self._episode = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, bool)

    def _reset_slots(self, mask: NDArray[np.bool_]) -> None:
        """Start a new episode in the environments where `mask` is true."""
        raise NotImplementedError

    def _step(self, action: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns reward, terminated and truncated of all environments; those that have ended are ignored."""
        raise NotImplementedError

    def _observe(self) -> NDArray[Any]:
        """The observations, as a new array [num_envs, ...]."""
        raise NotImplementedError

    def _random_int(self, n: int, index: int = 0) -> NDArray[np.int64]:
        """One integer in [0, n) per environment, a function of its key, its current episode and `index`."""
        return (hash64(self._key, self._episode, index) % np.uint64(n)).astype(np.int64)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        if seed is not None:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
            self._key[:] = hash64(np.array(seeds, np.uint64), 0)
            self._episode[:] = 0
        else:
            self._episode += 1
        self._ended[:] = False
        self._reset_slots(np.ones(self.num_envs, bool))
        return self._observe(), {}

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], Any, Any, Any, dict[str, Any]]:
        resetting = self._ended
        reward, terminated, truncated = self._step(np.asarray(actions))
        if resetting.any():
            self._episode += resetting
            self._reset_slots(resetting)
        reward = np.where(resetting, 0.0, reward)
        terminated, truncated = terminated & ~resetting, truncated & ~resetting
        self._ended = terminated | truncated
        return self._observe(), reward, terminated, truncated, {}

    def step_into(
        self,
        actions: NDArray[Any],
        obs: NDArray[Any],
        reward: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
    ) -> NDArray[np.bool_] | None:
        """`step` that writes into given arrays; returns the success flags of ended episodes, where they are defined."""
        obs[:], reward[:], terminated[:], truncated[:], info = self.step(actions)
        return info.get("success")

    def _render_slot(self, slot: int) -> NDArray[np.uint8]:
        """A rendered frame of one environment for a human viewer: [height, width, RGB]."""
        raise NotImplementedError

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        if self.render_mode is None:
            gym.logger.warn('render() needs an environment that was made with render_mode="rgb_array"')
            return None
        return tuple(self._render_slot(slot) for slot in range(self.num_envs))

    def state_dict(self) -> Snapshot:
        fields = ("_key", "_episode", "_ended", *self.state_fields)
        return {name: getattr(self, name).tolist() for name in fields}

    def load_state_dict(self, state: Snapshot) -> None:
        for name, values in state.items():
            setattr(self, name, np.array(values, getattr(self, name).dtype))


class SingleEnv(gym.Env):
    """A BatchedEnv of batch size one as a gym.Env, for `gymnasium.make`."""

    def __init__(self, batched: BatchedEnv) -> None:
        self.batched = batched
        self.metadata = {k: v for k, v in batched.metadata.items() if k != "autoreset_mode"}
        self.observation_space = batched.single_observation_space
        self.action_space = batched.single_action_space
        self.render_mode = batched.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        batched_options = {name: np.asarray(value)[None] for name, value in (options or {}).items()}
        obs, info = self.batched.reset(seed=seed, options=batched_options)
        return obs[0], info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.batched.step(np.array([action]))
        scalars = {name: values[0].item() for name, values in info.items() if not name.startswith("_")}
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), scalars

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        frames = self.batched.render()
        return None if frames is None else frames[0]


class VectorEnvBatch(EnvBatch):
    """A BatchedEnv as an EnvBatch. Its state is a few arrays, so running episodes can be saved and resumed exactly."""

    def __init__(self, name: str, env: BatchedEnv, seed: int, stream: int) -> None:
        space = env.single_observation_space
        assert isinstance(space, gym.spaces.Box) and space.shape is not None
        assert isinstance(env.single_action_space, gym.spaces.Discrete)
        dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        actions = int(env.single_action_space.n)
        super().__init__(Spec(name, space.shape, dtype, actions, horizon=env.horizon), env.num_envs)
        self.env = env
        self.seeds = [derive(seed, stream, slot) for slot in range(env.num_envs)]

    def _start(self) -> VectorStep:
        obs, _ = self.env.reset(seed=self.seeds)
        none = np.zeros(self.num_envs, bool)
        return VectorStep(obs, np.zeros(self.num_envs), none, none, ~none)

    def _advance(self, action: NDArray[np.int64]) -> VectorStep:
        first = self.env._ended.copy()
        obs, reward, terminated, truncated, info = self.env.step(action)
        return VectorStep(obs, reward, terminated, truncated, first, success=info.get("success"))

    def start_rendering(self) -> float:
        if "rgb_array" not in self.env.metadata["render_modes"]:
            return super().start_rendering()
        return self.env.metadata["render_fps"]

    def render(self, slot: int) -> NDArray[np.uint8]:
        return self.env._render_slot(slot)

    def _save(self) -> Snapshot:
        return self.env.state_dict()

    def _restore(self, state: Snapshot) -> None:
        self.env.load_state_dict(state)
