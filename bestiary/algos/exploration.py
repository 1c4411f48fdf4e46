"""Exploration: how much each environment explores, as the number that an actor hands to `act` at every step."""
# pyright: reportUnknownMemberType=false

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.types import Snapshot, TimeStep


class Explorer(Protocol):
    def __call__(self, step: TimeStep) -> Tensor:
        """One number in [0, 1] per environment, [B]."""
        ...

    def part(self, first: int, count: int) -> "Explorer":
        """The explorer of some of the environments, for an actor that plays only those."""
        ...

    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> None: ...


class FixedExploration:
    """A constant number per environment."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __call__(self, step: TimeStep) -> Tensor:
        self.values = self.values.to(step.reward.device)
        return self.values

    def part(self, first: int, count: int) -> "FixedExploration":
        return FixedExploration(self.values[first : first + count])

    def state_dict(self) -> Snapshot:
        return {}

    def load_state_dict(self, state: Snapshot) -> None:
        pass


def per_actor_epsilon(actors: int, base: float, alpha: float) -> Tensor:
    """eps_i = base^(1 + alpha i / (N - 1)) of actor i of N (Horgan et al. 2018)."""
    return base ** (1 + alpha * torch.linspace(0, 1, actors, dtype=torch.float64)).float()


class CountBasedExploration:
    """Count-based exploration: epsilon is `scale` / n for an observation that an episode shows n times on average.

    Every kind of observation is thus explored about as often per episode: a junction as often as a whole corridor.
    Observations are counted together with the action that led to them, by hash, in a table of fixed size; two that
    share a bucket are explored a little less.
    """

    def __init__(self, scale: float) -> None:
        from bestiary.ops import counts  # compiled: loaded only where something is counted

        self.compiled = counts
        self.scale = scale
        self.counts = np.zeros(counts.BUCKETS + 1, np.int64)
        self.hash_keys = np.zeros(0, np.uint64)

    def hash_keys_for(self, size: int) -> NDArray[np.uint64]:
        """A fixed odd number for each entry of an observation, and one for the action."""
        if len(self.hash_keys) != size + 1:
            self.hash_keys = np.random.default_rng(0).integers(1, 2**63, size + 1).astype(np.uint64) * 2 + 1
        return self.hash_keys

    def __call__(self, step: TimeStep) -> Tensor:
        columns = step.obs.cpu().flatten(1).numpy(), step.prev_action.cpu().numpy(), step.is_first.cpu().numpy()
        keys = self.hash_keys_for(columns[0].shape[1])
        self.compiled.count(self.counts, keys, *columns)
        rarity = [self.compiled.rarity(self.counts, keys, *one) for one in zip(*columns, strict=True)]
        return (self.scale * torch.tensor(rarity)).float().to(step.reward.device)

    def part(self, first: int, count: int) -> "CountBasedExploration":
        return CountBasedExploration(self.scale)  # every actor counts what it sees itself

    def state_dict(self) -> Snapshot:  # keys as in checkpoints of 0.1
        used = self.counts.nonzero()[0]
        return {"places": torch.from_numpy(used), "counts": torch.from_numpy(self.counts[used])}

    def load_state_dict(self, state: Snapshot) -> None:
        self.counts[:] = 0
        if state:
            self.counts[state["places"].numpy()] = state["counts"].numpy()
