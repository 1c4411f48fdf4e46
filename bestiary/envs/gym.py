"""Any environment registered with Gymnasium: discrete actions, pictures or vectors."""

import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from bestiary.envs.world import Raw, World
from bestiary.errors import UserError
from bestiary.extras import require
from bestiary.seeding import derive
from bestiary.suggest import did_you_mean
from bestiary.types import Snapshot, Spec


class Replayable(gymnasium.Wrapper):
    """Gives every episode a seed of its own, so that a running episode is its number and the actions since.

    `reset(options={"resume": [(episode, actions), ...]})` plays the running episode of this slot again.
    """

    def __init__(self, env: gymnasium.Env, address: tuple[int, ...]) -> None:
        super().__init__(env)
        self.address = address
        self.slot = address[-1]
        self.episode = -1
        self.over = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        resume = (options or {}).get("resume")
        self.over = False
        self.episode, actions = (self.episode + 1, []) if resume is None else resume[self.slot]
        obs, info = self.env.reset(seed=derive(*self.address, self.episode))
        for action in actions:
            obs, _, terminated, truncated, info = self.env.step(action)
            self.over = bool(terminated or truncated)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.over:  # resumed on an episode's last row: its vector environment does not know it must reset
            obs, info = self.reset()
            return obs, 0.0, False, False, info
        return self.env.step(action)


def build(cfg: "Gym", address: tuple[int, ...]) -> gymnasium.Env:
    kwargs: dict[str, Any] = dict(cfg.kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's advice about versions is not the user's error
        return Replayable(gymnasium.make(cfg.id, **kwargs), address)


def probe(cfg: "Gym") -> tuple[Spec, bool]:
    """What the environment looks like, and whether its pictures carry their channels last."""
    try:
        env = build(cfg, (0, 0, 0))
    except gymnasium.error.DependencyNotInstalled as e:
        if "box2d" in str(gymnasium.spec(cfg.id).entry_point):
            require("Box2D", "box2d")
        raise UserError(f"{cfg.id} needs a package that is not installed: {e}") from None
    except gymnasium.error.Error as e:
        hint = did_you_mean(cfg.id, gymnasium.registry, str(e))
        raise UserError(f"{cfg.id!r} is not registered with Gymnasium: {hint}") from None
    except ModuleNotFoundError as e:
        raise UserError(f"{cfg.id!r} cannot be imported: {e}") from None
    except TypeError as e:
        raise UserError(f"{cfg.id} does not accept env.kwargs={cfg.kwargs}: {e}") from None
    obs, actions = env.observation_space, env.action_space
    env.close()
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise UserError(f"{cfg.id} has actions {actions}; only Discrete actions are supported")
    if actions.start != 0:
        raise UserError(f"{cfg.id} counts its actions from {actions.start}; wrap it so that they start at 0")
    if not isinstance(obs, gymnasium.spaces.Box) or len(obs.shape) not in (1, 3):
        raise UserError(
            f"{cfg.id} shows {obs}; only a vector (Box of rank 1) or a picture (Box of rank 3) is supported: "
            "wrap it with gymnasium.wrappers.FlattenObservation"
        )
    is_image = len(obs.shape) == 3
    last = is_image and obs.shape[-1] in (1, 3, 4)
    shape = (obs.shape[2], *obs.shape[:2]) if last else obs.shape
    dtype = torch.uint8 if obs.dtype == np.uint8 else torch.float32
    horizon = None if env.spec is None else env.spec.max_episode_steps
    return Spec(cfg.id, tuple(shape), dtype, int(actions.n), horizon=horizon), last


class GymWorld(World):
    def __init__(self, cfg: "Gym", num_envs: int, seed: int, stream: int) -> None:
        spec, self.channels_last = probe(cfg)
        super().__init__(spec, num_envs)
        makers = [functools.partial(build, cfg, (seed, stream, slot)) for slot in range(num_envs)]
        if cfg.processes:
            self.env = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        else:
            self.env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
        self._ended = np.zeros(num_envs, bool)
        self._episode = np.zeros(num_envs, np.int64)
        self._journal: list[list[int]] = [[] for _ in range(num_envs)]

    def _picture(self, obs: NDArray[Any]) -> NDArray[Any]:
        if self.channels_last:
            obs = np.moveaxis(obs, -1, 1)
        dtype = np.uint8 if self.spec.obs_dtype == torch.uint8 else np.float32
        return np.array(obs, dtype, order="C")  # vector environments reuse their buffer

    def _start(self) -> Raw:
        obs, _ = self.env.reset(options={"resume": [(0, [])] * self.num_envs})
        none = np.zeros(self.num_envs, bool)
        self._ended[:] = False
        self._episode[:] = 0
        self._journal = [[] for _ in range(self.num_envs)]
        return Raw(self._picture(obs), np.zeros(self.num_envs), none, none, ~none)

    def _advance(self, action: NDArray[np.int64]) -> Raw:
        is_first = self._ended
        obs, reward, terminated, truncated, _ = self.env.step(action)
        for slot, chosen in enumerate(action.tolist()):
            if is_first[slot]:
                self._journal[slot].clear()
            else:
                self._journal[slot].append(chosen)
        self._episode += is_first
        self._ended = terminated | truncated
        return Raw(self._picture(obs), reward, terminated, truncated & ~terminated, is_first)

    def _save(self) -> Snapshot:
        return {
            "episode": self._episode.tolist(),
            "journal": [list(j) for j in self._journal],
            "ended": self._ended.tolist(),
        }

    def _restore(self, state: Snapshot) -> None:
        resume = list(zip(state["episode"], state["journal"], strict=True))
        self.env.reset(options={"resume": resume})
        self._episode = np.array(state["episode"], np.int64)
        self._journal = [list(j) for j in state["journal"]]
        self._ended = np.array(state["ended"], bool)

    def close(self) -> None:
        self.env.close()


@dataclass(frozen=True)
class Gym:
    """Any Gymnasium id with discrete actions."""

    id: str = "CartPole-v1"
    kwargs: dict[str, int | float | bool | str] = field(default_factory=dict)
    """arguments for gymnasium.make"""
    processes: bool = False
    """one process per environment instead of one after the other"""

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> World:
        return GymWorld(self, num_envs, seed, stream)
