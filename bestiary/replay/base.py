"""The interface of a replay: trajectories in, batches out, at the replay's own rate."""

from math import prod
from typing import Protocol, Self

from torch import Tensor

from bestiary.types import Batch, Snapshot, Spec, State, Trajectory, ValueTargets


class Replay(Protocol):
    aligned: bool
    """True: `add` needs the trajectories of all environment streams at once; False: any consecutive streams will do"""

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        """Add a trajectory of consecutive environment streams, the first of which is number `stream`."""
        ...

    def sample(self) -> Batch | None:
        """A batch to learn from; None: there is too little data, or no update is due."""
        ...

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        """Set the priorities of the sampled items `keys`."""
        ...

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        """Store a critic's targets with the transitions of the sampled episodes `keys`."""
        ...

    @property
    def full(self) -> bool:
        """True when actors should pause because learning lags behind collection."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of experience held now."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics for the log."""
        ...

    def state_dict(self) -> Snapshot: ...
    def load_state_dict(self, state: Snapshot) -> None: ...


class ReplayBuilder(Protocol):
    """A replay's settings together with what the algorithm and the runtime decide: streams, unroll, burn-in, ..."""

    def share(self, parts: int, learners: int = 1) -> Self:
        """The builder of one of `parts` shards, from which every learner takes its batches."""
        ...

    def nbytes(self, spec: Spec, unroll: int) -> int:
        """Approximate bytes of the full replay."""
        ...

    def build(self, seed: int, spec: Spec, state: State) -> Replay:
        """state: initial recurrent state of one environment. Refuses a replay that does not fit into memory."""
        ...


def step_bytes(spec: Spec) -> int:
    """Bytes of a time step: observation, two actions, weight version, reward and two flags."""
    return prod(spec.obs_shape) * spec.obs_dtype.itemsize + 8 + 8 + 8 + 4 + 1 + 1
