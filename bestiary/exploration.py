"""How much each environment slot explores: the number an actor hands to `act` with every row."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.types import Snapshot, TimeStep


class Explorer(Protocol):
    def __call__(self, step: TimeStep) -> Tensor:
        """One number in [0, 1] per slot, [B]."""
        ...

    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> None: ...


class Fixed:
    """The same numbers at every row, one per slot."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __call__(self, step: TimeStep) -> Tensor:
        self.values = self.values.to(step.reward.device)
        return self.values

    def state_dict(self) -> Snapshot:
        return {}

    def load_state_dict(self, state: Snapshot) -> None:
        pass


class Novelty:
    """scale / N^power: N counts how often what is seen, together with the action that led to it, was seen before.

    Observations are counted by their hash in a table of fixed size; two that share a place are rarely noticed, and
    then only explored a little less.
    """

    def __init__(self, scale: float, power: float = 0.5) -> None:
        from bestiary import counting  # compiled: loaded only where something is counted

        self.counting = counting
        self.scale, self.power = scale, power
        self.counts = np.zeros(counting.PLACES, np.int64)
        self.odd = np.zeros(0, np.uint64)

    def numbers(self, size: int) -> NDArray[np.uint64]:
        """A fixed odd number for each entry of an observation, and one for the action."""
        if len(self.odd) != size + 1:
            self.odd = np.random.default_rng(0).integers(1, 2**63, size + 1).astype(np.uint64) * 2 + 1
        return self.odd

    def __call__(self, step: TimeStep) -> Tensor:
        seen, prev_action = step.obs.cpu().flatten(1).numpy(), step.prev_action.cpu().numpy()
        odd = self.numbers(seen.shape[1])
        self.counting.count(self.counts, odd, seen, prev_action)
        often = np.array([self.counts[self.counting.place(odd, s, a)] for s, a in zip(seen, prev_action, strict=True)])
        least = (self.scale / often**self.power).clip(max=1).astype(np.float32)
        return torch.from_numpy(least).to(step.reward.device)

    def state_dict(self) -> Snapshot:
        used = self.counts.nonzero()[0]
        return {"places": torch.from_numpy(used), "counts": torch.from_numpy(self.counts[used])}

    def load_state_dict(self, state: Snapshot) -> None:
        self.counts[:] = 0
        if state:
            self.counts[state["places"].numpy()] = state["counts"].numpy()
