"""First in, first out, each trajectory once: on-policy learning is a replay that forgets at once."""

from collections import deque
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from bestiary import tree
from bestiary.errors import UserError
from bestiary.replay.base import row_bytes
from bestiary.types import Batch, Snapshot, Spec, State, TimeStep, Trajectory, ValueTargets


def columns(t: Trajectory, start: int, count: int) -> Trajectory:
    """Some streams of a trajectory: batch is axis 1 in rows and axis 0 in memory."""
    step, action, aux = tree.narrow((t.step, t.action, t.aux), 1, start, count)
    state, version = tree.narrow((t.state, t.version), 0, start, count)
    return Trajectory(step, action, aux, state, version)


def join(parts: list[Trajectory]) -> Trajectory:
    step, action, aux = tree.cat([(p.step, p.action, p.aux) for p in parts], 1)
    state, version = tree.cat([(p.state, p.version) for p in parts], 0)
    return Trajectory(step, action, aux, state, version)


class FifoReplay:
    aligned = False

    def __init__(self, cfg: "Fifo") -> None:
        self.cfg = cfg
        self.waiting: deque[Trajectory] = deque()
        self.size = 0

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        self.waiting.append(trajectory)
        self.size += trajectory.action.shape[1]

    def sample(self) -> Batch | None:
        if self.size < self.cfg.batch_size:
            return None
        parts, missing = [], self.cfg.batch_size
        while missing:
            t = self.waiting.popleft()
            width = t.action.shape[1]
            if width > missing:
                self.waiting.appendleft(columns(t, missing, width - missing))
                t, width = columns(t, 0, missing), missing
            parts.append(t)
            missing -= width
        self.size -= self.cfg.batch_size
        return Batch(join(parts))

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("a queue has no priorities")

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        raise AssertionError("a queue stores no value targets")

    @property
    def full(self) -> bool:
        return self.size >= self.cfg.capacity

    @property
    def bytes(self) -> int:
        return tree.size(list(self.waiting))

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> Snapshot:
        # NamedTuples are not among the types a safe checkpoint may hold: plain tuples are
        return {"waiting": [(tuple(t.step), *t[1:]) for t in self.waiting]}

    def load_state_dict(self, state: Snapshot) -> None:
        self.waiting = deque(Trajectory(TimeStep(*step), *rest) for step, *rest in state["waiting"])
        self.size = sum(t.action.shape[1] for t in self.waiting)


@dataclass(frozen=True)
class Fifo:
    """Each trajectory is learnt from once, in order of arrival."""

    batch_size: int
    """trajectories per update"""
    capacity: int
    """waiting trajectories at which actors pause"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch-size={self.batch_size} must be at least 1")
        if self.capacity < self.batch_size:
            raise UserError(
                f"batch-size={self.batch_size} can never be filled: at most {self.capacity} trajectories wait; "
                f"lower --algo.batch-size to {self.capacity}, or raise --runtime.envs or --algo.queue"
            )

    def share(self, parts: int, learners: int = 1) -> Self:
        return self  # it is as large as its streams ask for

    def nbytes(self, spec: Spec, unroll: int) -> int:
        return (self.capacity + self.batch_size) * (unroll + 1) * row_bytes(spec)

    def build(self, seed: int = 0, spec: Spec | None = None, state: State = ()) -> FifoReplay:
        return FifoReplay(self)
