"""What a world told, row by row, for tests that look at it from several sides."""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from bestiary import tree
from bestiary.envs.env_batch import EnvBatch
from bestiary.types import Episode, Snapshot, Spec, TimeStep

PICTURE = "stories/Picture-v0"


class Picture(gymnasium.Env):
    """Noise that ends by chance or, after twelve steps, by the clock, painted again and again on the same canvas."""

    limit = 12

    observation_space = gymnasium.spaces.Box(0, 255, (6, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.canvas = np.zeros((6, 8, 3), np.uint8)

    def _paint(self) -> np.ndarray:
        self.canvas[:] = self.np_random.integers(0, 256, self.canvas.shape, np.uint8)
        return self.canvas

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return self._paint(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        ended = bool(self.np_random.random() < 0.1) and self.t < self.limit  # never both at once
        return self._paint(), 0.1 * (action + 1), ended, False, {}


# the checker would object, rightly, to the canvas that is handed out again and again
gymnasium.register(PICTURE, entry_point=Picture, max_episode_steps=Picture.limit, disable_env_checker=True)


class Story(NamedTuple):
    spec: Spec
    rows: TimeStep  # [T+1, B, ...] copied the moment they were told
    kept: TimeStep  # the same rows as they were handed out, looked at only when the story was over
    action: Tensor  # [T, B]
    episodes: list[list[Episode]]  # T+1 lists: what was reported together with row t
    saved: list[Snapshot]  # T+1 snapshots: what the world would have saved at row t

    def ends(self) -> list[int]:
        """Rows that are the last of an episode in some slot."""
        return (self.rows.is_first.any(1).nonzero().flatten() - 1).tolist()[1:]

    def told(self, slot: int) -> list[tuple[int, Episode]]:
        """(row, episode) for every episode reported by a slot."""
        return [(t, e) for t, reported in enumerate(self.episodes) for e in reported if e.slot == slot]


def random_actions(num_actions: int, rows: int, num_envs: int, seed: int = 0) -> Tensor:
    return torch.randint(num_actions, (rows, num_envs), generator=torch.Generator().manual_seed(seed))


def tell(env_batch: EnvBatch, action: Tensor) -> Story:
    """Reset the world and play; `action` is [T, B]."""
    return _record(env_batch, action, [env_batch.reset()])


def tell_on(env_batch: EnvBatch, action: Tensor) -> Story:
    """Play on from where the world stands; there is no row 0."""
    return _record(env_batch, action, [])


def _record(env_batch: EnvBatch, action: Tensor, kept: list[TimeStep]) -> Story:
    rows = [tree.map(torch.clone, row) for row in kept]
    saved = [env_batch.state_dict() for _ in kept]
    episodes: list[list[Episode]] = [[] for _ in kept]
    for chosen in action:
        row, ended = env_batch.step(chosen)
        kept.append(row)
        rows.append(tree.map(torch.clone, row))
        saved.append(env_batch.state_dict())
        episodes.append(ended)
    return Story(env_batch.spec, tree.stack(rows), tree.stack(kept), action, episodes, saved)


def different_fields(a: TimeStep, b: TimeStep) -> list[str]:
    """Names of the fields in which two stories differ; an empty list if they are the same."""
    return [name for name, x, y in zip(TimeStep._fields, a, b, strict=True) if x.dtype != y.dtype or not x.equal(y)]
