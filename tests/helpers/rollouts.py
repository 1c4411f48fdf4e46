"""Rollouts of an environment batch with given actions, recorded step by step."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from bestiary import tree
from bestiary.envs.env_batch import EnvBatch
from bestiary.types import Episode, Snapshot, Spec, TimeStep

IMAGE_ENV = "helpers/Noise-v0"


class Noise(gymnasium.Env):
    """Noise images; terminates at random or is truncated after twelve steps. Every observation is the same buffer."""

    limit = 12

    observation_space = gymnasium.spaces.Box(0, 255, (6, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.buffer = np.zeros((6, 8, 3), np.uint8)

    def _observe(self) -> np.ndarray:
        self.buffer[:] = self.np_random.integers(0, 256, self.buffer.shape, np.uint8)
        return self.buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        terminated = bool(self.np_random.random() < 0.1) and self.t < self.limit  # never both at once
        return self._observe(), 0.1 * (action + 1), terminated, False, {}


# Gymnasium's checker objects to the buffer that every step returns again.
gymnasium.register(IMAGE_ENV, entry_point=Noise, max_episode_steps=Noise.limit, disable_env_checker=True)


class Rollout(NamedTuple):
    spec: Spec
    steps: TimeStep  # [T+1, B, ...] cloned as soon as the environment returned them
    as_returned: TimeStep  # the same time steps without cloning, read when the rollout is over
    action: Tensor  # [T, B]
    episodes: list[list[Episode]]  # T+1 lists: episodes reported together with time step t
    saved: list[Snapshot]  # T+1 snapshots of the environment batch, one per time step

    def ends(self) -> list[int]:
        """Indices of time steps that are the last of an episode in some slot."""
        return (self.steps.is_first.any(1).nonzero().flatten() - 1).tolist()[1:]

    def finished(self, slot: int) -> list[tuple[int, Episode]]:
        """(index of the time step, episode) for every episode that a slot reported."""
        return [(t, e) for t, reported in enumerate(self.episodes) for e in reported if e.slot == slot]


def random_actions(num_actions: int, steps: int, num_envs: int, seed: int = 0) -> Tensor:
    return torch.randint(num_actions, (steps, num_envs), generator=torch.Generator().manual_seed(seed))


def roll_out(env_batch: EnvBatch, action: Tensor) -> Rollout:
    """Reset the environments and take the actions, [T, B]."""
    return _record(env_batch, action, [env_batch.reset()])


def continue_rollout(env_batch: EnvBatch, action: Tensor) -> Rollout:
    """Take the actions from the current state of the environments; there is no time step 0."""
    return _record(env_batch, action, [])


def _record(env_batch: EnvBatch, action: Tensor, as_returned: list[TimeStep]) -> Rollout:
    steps = [tree.map(torch.clone, step) for step in as_returned]
    saved = [env_batch.state_dict() for _ in as_returned]
    episodes: list[list[Episode]] = [[] for _ in as_returned]
    for chosen in action:
        step, ended = env_batch.step(chosen)
        as_returned.append(step)
        steps.append(tree.map(torch.clone, step))
        saved.append(env_batch.state_dict())
        episodes.append(ended)
    return Rollout(env_batch.spec, tree.stack(steps), tree.stack(as_returned), action, episodes, saved)


def different_fields(a: TimeStep, b: TimeStep) -> list[str]:
    """Names of the fields in which two sequences of time steps differ; empty if they are equal bit for bit."""
    return [name for name, x, y in zip(TimeStep._fields, a, b, strict=True) if x.dtype != y.dtype or not x.equal(y)]
