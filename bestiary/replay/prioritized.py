"""Experience drawn by how surprising it was: transitions or sequences, out of one ring of rows (Schaul et al. 2016)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.config.machine import SMALL_BYTES, check_memory
from bestiary.errors import UserError
from bestiary.ops.priorities import importance
from bestiary.replay.base import row_bytes
from bestiary.replay.ring_buffer import PriorityEvictionRing, RateLimiter, Ring, RingReplay, bytes_needed
from bestiary.replay.sum_tree import SumTree
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, Spec, State, Trajectory


class PrioritizedReplay(RingReplay):
    """An item is a number of rows in a row of one stream, beginning at every `stride`-th.

    Items carry numbers that never repeat: number k of a stream begins with row k * stride, and its weight lies in the
    tree where that row lies in the ring. A priority that comes back for an item whose rows have been written over
    meanwhile is recognised by its number and dropped. What a new item is worth is judged from what the actor has kept,
    once its last row is there.
    """

    def __init__(self, cfg: "Prioritized", seed: int) -> None:
        self.cfg = cfg
        self.seed = derive(seed, REPLAY)
        keep = bool(cfg.stored_state)
        if cfg.eviction == "fifo":
            self.ring = Ring(cfg.streams, cfg.capacity, keep)
        else:
            self.ring = PriorityEvictionRing(cfg.streams, cfg.capacity, keep, cfg.rows, self._worth)
        self.rate_limiter = RateLimiter(cfg.ratio, cfg.warmup)
        self.tree = SumTree(self.ring.slots * cfg.streams)
        self.next = 0  # number of the next item to be complete
        self.items = 0  # held
        self.late = 0  # priorities that came too late

    # -- in ------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        self.ring.add(trajectory, self._forget)
        self.rate_limiter.add(int((~trajectory.step.is_first[1:]).sum()))
        end = max(self.next, (self.ring.newest + 1 - self.cfg.rows) // self.cfg.stride + 1)
        complete = self._held(np.arange(self.next, end))  # an item may be lost in the moment in which it is complete
        if len(complete):
            self._judge(complete)
        self.next = end

    def _held(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers[self.ring.holds(numbers * self.cfg.stride, self.cfg.rows)]

    def _forget(self, rows: range) -> None:
        """Items that have one of these rows are lost with them."""
        first = max(0, -(-(rows.start - self.cfg.rows + 1) // self.cfg.stride))
        gone = self._held(np.arange(first, min((rows.stop - 1) // self.cfg.stride + 1, self.next)))
        slots = self._slots(gone[:, None], np.arange(self.cfg.streams)).flatten()
        self.tree.set(slots, np.zeros(len(slots)))
        self.items -= len(slots)

    def _worth(self) -> NDArray[np.float64]:
        return self.tree.leaves().reshape(-1, self.cfg.streams)

    def _judge(self, numbers: NDArray[np.int64]) -> None:
        number, stream = (x.flatten() for x in np.meshgrid(numbers, np.arange(self.cfg.streams), indexing="ij"))
        t = self.ring.gather(self._rows(number), stream, seen=False)
        priority = self.cfg.judge(t)
        opens = t.step.is_first[self.cfg.burn_in + 1 : self.cfg.burn_in + 1 + self.cfg.length]
        # where every move leads into another episode there is nothing to learn
        weight = np.where(opens.all(0).numpy(), 0.0, self._weight(priority))
        self.tree.set(self._slots(number, stream), weight)
        self.items += len(number)

    def _weight(self, priority: Tensor) -> NDArray[np.float64]:
        """Not a number stays one, for the tree to refuse."""
        least = np.maximum(priority.detach().cpu().double().numpy(), self.cfg.floor)
        return np.where(np.isnan(least), np.nan, least**self.cfg.alpha)  # to the power of 0 it would be a number

    def _slots(self, number: NDArray[np.int64], stream: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.ring.place(number * self.cfg.stride) * self.cfg.streams + stream

    def _rows(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        return number * self.cfg.stride + np.arange(self.cfg.rows)[:, None]

    # -- out -----------------------------------------------------------------------------------------

    def sample(self) -> Batch | None:
        rng = self.next_draw()
        if rng is None:
            return None
        slots, weight = self.tree.draw(self.cfg.batch_size, rng)
        place, stream = np.divmod(slots, self.cfg.streams)
        number = self.ring.number(place) // self.cfg.stride
        t = self.ring.gather(self._rows(number), stream)
        start = number * self.cfg.stride
        later = start + self.cfg.burn_in
        share = torch.from_numpy(weight / self.tree.total)
        kept = self.cfg.stored_state and self.cfg.burn_in and self.cfg.burn_in % self.ring.unroll == 0
        return Batch(
            t._replace(state=self.ring.state_at(start, stream)),
            torch.from_numpy(number * self.cfg.streams + stream),
            importance(share, len(self), self.cfg.beta).float(),
            self.ring.state_at(later, stream) if kept else (),
            {"heaviest": ((len(self) * share.min()) ** -self.cfg.beta).float()},
        )

    def __len__(self) -> int:
        """Items held."""
        return self.items

    def is_empty(self) -> bool:
        return self.tree.total == 0.0

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        number, stream = np.divmod(keys.numpy(), self.cfg.streams)
        weight, held = self._weight(priorities), self.ring.holds(number * self.cfg.stride, self.cfg.rows)
        self.late += int((~held).sum())
        self.tree.set(self._slots(number, stream)[held], weight[held])

    def metrics(self) -> dict[str, float]:
        """replay_ratio: moves trained per move played."""
        batches, moves = self.rate_limiter.batches, max(1, self.rate_limiter.moves)
        return {
            **super().metrics(),
            "replay_ratio": batches * self.cfg.batch_size * self.cfg.length / moves,
            "late_priorities": self.late,
        }

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        mine = {"next": self.next, "items": self.items, "late": self.late}
        return super().state_dict() | mine | {"weights": torch.from_numpy(self.tree.leaves())}

    def load_state_dict(self, state: Snapshot) -> bool:
        self.late = state["late"]
        fits = super().load_state_dict(state)
        if fits:
            self.next, self.items = state["next"], state["items"]
            self.tree.rebuild(state["weights"].numpy())
        return fits


@dataclass(frozen=True)
class Prioritized:
    """Rows of the recent past, drawn by their priority to the power of alpha."""

    streams: int
    """environments played at once"""
    batch_size: int
    capacity: int
    """moves kept"""
    burn_in: int
    """rows of an item before those that are trained"""
    length: int
    """moves of an item that are trained"""
    n_step: int
    """rows needed after the last of them"""
    stride: int
    """rows between the beginnings of two items"""
    ratio: float
    """updates per move"""
    warmup: int
    """moves before the first update"""
    judge: Callable[[Trajectory], Tensor]
    """rows of items -> their first priorities, [B]"""
    alpha: float = 0.6
    beta: float = 0.4
    floor: float = 1e-6
    """the least priority: what is understood is still drawn now and then"""
    stored_state: bool | None = True
    """items begin with the memory the actor had there; None: if it takes no more room than rows, or little"""
    unroll: int = 1
    """moves of a trajectory: how often memory is kept"""
    eviction: Literal["fifo", "priority"] = "fifo"
    """which rows make room for new ones: the oldest, or the trajectory of the lowest priority"""

    @property
    def rows(self) -> int:
        return self.burn_in + self.length + self.n_step

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.batch-size={self.batch_size} must be at least 1")
        if self.ratio <= 0:
            raise UserError(f"algo.ratio={self.ratio} must be positive")
        for name, power in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 <= power <= 1:
                raise UserError(f"algo.{name}={power} must lie in [0, 1]")
        if self.capacity < self.streams * self.rows:
            raise UserError(
                f"algo.capacity={self.capacity} cannot hold one sequence of {self.rows} rows for each of "
                f"{self.streams} environments: raise it to {self.streams * self.rows}"
            )
        blocks, needed = (1 + self.capacity // self.streams) // self.unroll, 1 + -(-self.rows // self.unroll)
        if self.eviction == "priority" and blocks < needed:
            raise UserError(
                f"algo.capacity={self.capacity} leaves nothing to choose from for --algo.eviction priority: "
                f"raise it to {needed * self.unroll * self.streams}, or use fifo"
            )
        least = self.streams * self.rows + self.batch_size * self.stride
        if self.warmup < least:
            raise UserError(
                f"algo.warmup={self.warmup} moves do not hold a batch of {self.batch_size} items: raise it to {least}"
            )

    def share(self, parts: int, learners: int = 1) -> Self:
        kept = {"capacity": self.capacity // parts, "warmup": self.warmup // parts}
        return replace(self, **kept, ratio=self.ratio * learners)

    def nbytes(self, spec: Spec, unroll: int) -> int:
        return self.capacity * row_bytes(spec)

    def build(self, seed: int, spec: Spec | None = None, state: State = ()) -> PrioritizedReplay:
        every = max(self.unroll, 1)
        stored = self.stored_state
        if spec is not None:
            aux = 4 * spec.num_actions  # values of actions are kept with each row
            if stored is None:
                rows = bytes_needed(self.capacity, spec, aux, (), every)
                stored = tree.size(state) * (self.capacity // every) <= max(rows, SMALL_BYTES)
            check_memory(bytes_needed(self.capacity, spec, aux, state if stored else (), every), self.capacity)
        return PrioritizedReplay(replace(self, stored_state=bool(stored)), seed)
