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

    def part(self, first: int, count: int) -> "Explorer":
        """That of some of the slots, for an actor that plays only these."""
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

    def part(self, first: int, count: int) -> "Fixed":
        return Fixed(self.values[first : first + count])

    def state_dict(self) -> Snapshot:
        return {}

    def load_state_dict(self, state: Snapshot) -> None:
        pass


def ladder(rungs: int, base: float, alpha: float) -> Tensor:
    """base^(1 + alpha i / (rungs - 1)): from bold to nearly greedy, a rung an environment (Horgan et al. 2018)."""
    return base ** (1 + alpha * torch.linspace(0, 1, rungs, dtype=torch.float64)).float()


class Novelty:
    """The chance given for what an episode shows once or less; for what it shows n times, an nth of it.

    Every kind of row is thus tried out about as often per episode: a crossroads as often as a whole long corridor. The
    like of a row is what shows the same observation after the same action. It is counted by its hash in a table of
    fixed size; two kinds that share a place are rarely noticed, and then only explored a little less.
    """

    def __init__(self, chance: float) -> None:
        from bestiary.ops import counts  # compiled: loaded only where something is counted

        self.counting = counts
        self.chance = chance
        self.counts = np.zeros(counts.PLACES + 1, np.int64)
        self.odd = np.zeros(0, np.uint64)

    def numbers(self, size: int) -> NDArray[np.uint64]:
        """A fixed odd number for each entry of an observation, and one for the action."""
        if len(self.odd) != size + 1:
            self.odd = np.random.default_rng(0).integers(1, 2**63, size + 1).astype(np.uint64) * 2 + 1
        return self.odd

    def __call__(self, step: TimeStep) -> Tensor:
        rows = step.obs.cpu().flatten(1).numpy(), step.prev_action.cpu().numpy(), step.is_first.cpu().numpy()
        odd = self.numbers(rows[0].shape[1])
        self.counting.count(self.counts, odd, *rows)
        rarity = [self.counting.rarity(self.counts, odd, *row) for row in zip(*rows, strict=True)]
        return (self.chance * torch.tensor(rarity)).float().to(step.reward.device)

    def part(self, first: int, count: int) -> "Novelty":
        return Novelty(self.chance)  # each counts what it sees itself

    def state_dict(self) -> Snapshot:
        used = self.counts.nonzero()[0]
        return {"places": torch.from_numpy(used), "counts": torch.from_numpy(self.counts[used])}

    def load_state_dict(self, state: Snapshot) -> None:
        self.counts[:] = 0
        if state:
            self.counts[state["places"].numpy()] = state["counts"].numpy()
