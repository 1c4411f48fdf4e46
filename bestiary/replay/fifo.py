"""First in, first out: a queue in which every trajectory is learnt from once, for on-policy learning."""

from collections import deque
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from bestiary import tree
from bestiary.errors import UserError
from bestiary.replay.base import step_bytes
from bestiary.types import Batch, Snapshot, Spec, State, TimeStep, Trajectory, ValueTargets


def select_streams(t: Trajectory, start: int, count: int) -> Trajectory:
    """Some environment streams of a trajectory. The batch axis is 1 in time steps and 0 in recurrent state."""
    step, action, aux = tree.narrow((t.step, t.action, t.aux), 1, start, count)
    state, version = tree.narrow((t.state, t.version), 0, start, count)
    return Trajectory(step, action, aux, state, version)


def concatenate_streams(parts: list[Trajectory]) -> Trajectory:
    """Trajectories of different environment streams as one."""
    step, action, aux = tree.cat([(p.step, p.action, p.aux) for p in parts], 1)
    state, version = tree.cat([(p.state, p.version) for p in parts], 0)
    return Trajectory(step, action, aux, state, version)


@dataclass(frozen=True)
class Fifo:
    """A first-in-first-out queue: every trajectory is learnt from once, in order of arrival."""

    batch_size: int = 32
    """batch size B: trajectories per update"""
    capacity: int | None = None
    """queued trajectories at which actors pause; None: twice the number of environments"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.replay.batch-size={self.batch_size} must be at least 1")


class FifoReplay:
    aligned = False

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.waiting: deque[Trajectory] = deque()
        self.size = 0  # queued trajectories, one per environment stream

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        self.waiting.append(trajectory)
        self.size += trajectory.action.shape[1]

    def sample(self) -> Batch | None:
        if self.size < self.batch_size:
            return None
        parts: list[Trajectory] = []
        missing = self.batch_size
        while missing:
            t = self.waiting.popleft()
            width = t.action.shape[1]
            if width > missing:
                self.waiting.appendleft(select_streams(t, missing, width - missing))
                t, width = select_streams(t, 0, missing), missing
            parts.append(t)
            missing -= width
        self.size -= self.batch_size
        return Batch(concatenate_streams(parts))

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("a queue has no priorities")

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        raise AssertionError("a queue stores no value targets")

    @property
    def full(self) -> bool:
        return self.size >= self.capacity

    @property
    def bytes(self) -> int:
        return tree.size(list(self.waiting))

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> Snapshot:
        # torch.load(weights_only=True) accepts plain tuples, but no NamedTuples
        return {"waiting": [(tuple(t.step), *t[1:]) for t in self.waiting]}

    def load_state_dict(self, state: Snapshot) -> None:
        self.waiting = deque(Trajectory(TimeStep(*step), *rest) for step, *rest in state["waiting"])
        self.size = sum(t.action.shape[1] for t in self.waiting)


@dataclass(frozen=True)
class FifoBuilder:
    cfg: Fifo
    streams: int

    def __post_init__(self) -> None:
        if self.capacity < self.cfg.batch_size:
            raise UserError(
                f"algo.replay.batch-size={self.cfg.batch_size} can never be filled: at most {self.capacity} "
                f"trajectories are queued; lower --algo.replay.batch-size to {self.capacity}, "
                "or raise --runtime.envs or --algo.replay.capacity"
            )

    @property
    def capacity(self) -> int:
        return 2 * self.streams if self.cfg.capacity is None else self.cfg.capacity

    def share(self, parts: int, learners: int = 1) -> Self:
        return self  # the capacity follows from the streams, not from the shards

    def nbytes(self, spec: Spec, unroll: int) -> int:
        return (self.capacity + self.cfg.batch_size) * (unroll + 1) * step_bytes(spec)

    def build(self, seed: int = 0, spec: Spec | None = None, state: State = ()) -> FifoReplay:
        return FifoReplay(self.cfg.batch_size, self.capacity)
