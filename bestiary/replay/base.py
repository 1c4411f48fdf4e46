"""What every replay promises: trajectories in, batches out, at its own ratio."""

from math import prod
from typing import Protocol, Self

from torch import Tensor

from bestiary.types import Batch, Snapshot, Spec, State, Trajectory, ValueTargets


class Replay(Protocol):
    aligned: bool
    """whether all streams must be added at once, side by side; else some may be, from any stream on"""

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        """What was played in the streams from this one on."""
        ...

    def sample(self) -> Batch | None:
        """A batch to learn from; None: too empty, or ahead of its ratio."""
        ...

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        """Set the priorities of the sampled items `keys`."""
        ...

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        """Store a critic's targets with the transitions of the sampled episodes `keys`."""
        ...

    @property
    def full(self) -> bool:
        """Producers should wait: what they add now would only grow old."""
        ...

    @property
    def bytes(self) -> int:
        """How much of experience it holds."""
        ...

    def metrics(self) -> dict[str, float]:
        """What a log should tell of it."""
        ...

    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> bool | None: ...


class ReplayBuilder(Protocol):
    def share(self, parts: int, learners: int = 1) -> Self:
        """What each of so many replays, with its part of the streams, should be; every learner takes a batch."""
        ...

    def nbytes(self, spec: Spec, unroll: int) -> int:
        """Bytes it will hold when full, about."""
        ...

    def build(self, seed: int, spec: Spec, state: State) -> Replay:
        """state: memory of one environment. Refuses what does not fit into this machine."""
        ...


def row_bytes(spec: Spec) -> int:
    """Of a row: what was seen, two actions, a version, a reward and two flags."""
    return prod(spec.obs_shape) * spec.obs_dtype.itemsize + 8 + 8 + 8 + 4 + 1 + 1
