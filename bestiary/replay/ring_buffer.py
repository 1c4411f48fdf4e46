"""Storage of time steps: each is kept once, in order, and new ones overwrite old ones."""
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.errors import UserError
from bestiary.replay.base import step_bytes
from bestiary.replay.rate_limiter import SampledReplay
from bestiary.types import Snapshot, Spec, State, TimeStep, Trajectory, ValueTargets

Ints = NDArray[np.int64]
Storage = Any  # a tree of tensors [slots, streams, ...]


class RingBuffer:
    """A ring buffer of time steps per environment stream; all streams advance together.

    Step numbers never repeat: step n is kept in slot n % slots. A trajectory's last step is the first step of the next
    one, so it is written twice, with the same content; its weight version is that of the trajectory it begins. The
    recurrent state at the start of each trajectory is kept if `keep_states`.
    """

    def __init__(self, streams: int, capacity: int, keep_states: bool) -> None:
        self.streams, self.capacity, self.keep_states = streams, capacity, keep_states
        self.slots = 1 + max(1, capacity // streams)  # transitions, and the step that the last one leads to
        self.storage: Storage = None
        self.states: State = ()  # [trajectories, streams, ...]
        self.unroll = 0
        self.newest = -1  # number of the last step stored

    @property
    def oldest(self) -> int:
        return max(0, self.newest - self.slots + 1)

    def slot(self, step: Ints) -> Ints:
        """The slots of step numbers."""
        return step % self.slots

    def step_in(self, slot: Ints) -> Ints:
        """The numbers of the steps that are in these slots now."""
        return self.newest - (self.newest - slot) % self.slots

    def holds(self, first: Ints, count: int) -> NDArray[np.bool_]:
        """Whether all of `count` steps, from each of `first` on, are there."""
        return (first >= self.oldest) & (first + count - 1 <= self.newest)

    def state_slot(self, step: Ints) -> Ints:
        """The slots of the recurrent states just before steps with which trajectories began."""
        return step // self.unroll % (self.slots // self.unroll + 1)

    def _evict(self, last: int, on_evict: Callable[[range], None]) -> None:
        """Announce the steps that will be overwritten by those up to `last`."""
        lost = range(self.oldest, max(0, last - self.slots + 1))
        if lost:
            on_evict(lost)

    def check_fits(self, **needed: int) -> None:
        """Refuse settings (flag=steps) that need more consecutive steps than there is room for."""
        for name, steps in needed.items():
            if steps >= self.slots:
                raise UserError(
                    f"algo.replay.capacity={self.capacity} holds {self.slots - 1} transitions for each of "
                    f"{self.streams} environments, fewer than the {steps} that --algo.{name.replace('_', '-')} needs: "
                    "raise it, or lower that"
                )

    def add(self, trajectory: Trajectory, on_evict: Callable[[range], None] = lambda steps: None) -> int:
        """Returns the number of its first step; `on_evict` gets the numbers of steps that are about to be lost."""
        unroll = len(trajectory.action) - 1
        version = trajectory.version.expand(unroll + 1, -1)
        new = (trajectory.step, trajectory.action, trajectory.aux, version)
        if self.storage is None:
            self.check_fits(unroll=unroll)
            self.unroll = unroll
            self.storage = tree.map(lambda x: storage_like(self.slots, x[0]), new)
            if self.keep_states:
                self.states = tree.map(lambda x: storage_like(self.slots // unroll + 1, x), trajectory.state)
        assert unroll == self.unroll, "trajectories of one length only"
        start = max(self.newest, 0)  # the first step of this trajectory is the last of the one before
        self._evict(start + unroll, on_evict)
        self.newest = start + unroll
        slot = torch.from_numpy(self.slot(np.arange(start, self.newest + 1)))
        tree.map(lambda store, x: store.index_copy_(0, slot, x.to(store.device)), self.storage, new)
        state_slot = int(self.state_slot(np.array(start)))
        for store, x in zip(self.states, trajectory.state if self.keep_states else (), strict=True):
            store[state_slot].copy_(x)
        return start

    def gather(self, step: Ints, stream: Ints, with_obs: bool = True) -> Trajectory:
        """Steps [T, B] of streams [B], without recurrent state; without observations where they are not needed."""
        index = torch.from_numpy(self.slot(step) * self.streams + stream)
        flat = index.flatten()
        time_step, *rest = self.storage
        kept = (time_step if with_obs else time_step._replace(obs=time_step.is_first), *rest)
        time_step, action, aux, version = tree.map(
            lambda store: store.flatten(0, 1).index_select(0, flat).view(*index.shape, *store.shape[2:]), kept
        )
        return Trajectory(time_step, action, aux, (), version[0])

    def state_at(self, step: Ints, stream: Ints) -> State:
        """Recurrent state just before steps [B] with which trajectories began."""
        if not self.states:
            return ()
        slot, column = torch.from_numpy(self.state_slot(step)), torch.from_numpy(stream)
        return tree.map(lambda store: store[slot, column], self.states)

    @property
    def bytes(self) -> int:
        """Bytes of the steps held, not of the storage allocated for them."""
        fraction = min(1.0, (self.newest + 1) / self.slots)
        return 0 if self.storage is None else int(fraction * tree.size((self.storage, self.states)))

    def metrics(self) -> dict[str, float]:
        return {"replay_steps": min(self.newest + 1, self.slots) * self.streams}

    def state_dict(self) -> Snapshot:  # keys as in checkpoints of 0.1
        state: Snapshot = {"newest": self.newest, "unroll": self.unroll}
        if self.storage is not None:
            # a view of a tensor would be saved with the whole storage behind it
            held = self.newest + 1
            step, *rest = tree.map(lambda x: x[:held].clone() if held < self.slots else x, self.storage)
            state |= {"rows": [tuple(step), *rest], "states": self.states}
        return state

    def load_state_dict(self, state: Snapshot) -> None:
        self.newest, self.unroll = state["newest"], state["unroll"]
        if "rows" in state:
            step, *rest = state["rows"]
            held = (TimeStep(*step), *rest)
            self.storage = tree.map(lambda x: storage_like(self.slots, x[0]), held)
            tree.map(lambda store, x: store[: len(x)].copy_(x), self.storage, held)
            self.states = tuple(state["states"])


class PriorityEvictionRing(RingBuffer):
    """A ring buffer that evicts the trajectory of the lowest priority, of all streams at once, not the oldest one.

    A block is the steps of one trajectory; tables say which block is in which block slot. The newest blocks, whose
    items have no priorities yet, are never evicted.
    """

    def __init__(
        self, streams: int, capacity: int, keep_states: bool, item: int, priorities: Callable[[], NDArray[np.float64]]
    ) -> None:
        """item: steps of an item; priorities: -> [slots, streams], of the items that begin in each slot."""
        super().__init__(streams, capacity, keep_states)
        self.item, self.priorities = item, priorities
        self.slot_of_block = np.full(1_024, -1, np.int64)  # of every block ever; -1: evicted, or not yet there
        self.block_in_slot: Ints = np.zeros(0, np.int64)

    @property
    def oldest(self) -> int:
        return int(self.block_in_slot.min()) * self.unroll if len(self.block_in_slot) else 0

    def slot(self, step: Ints) -> Ints:
        return self.slot_of_block[step // self.unroll] * self.unroll + step % self.unroll

    def step_in(self, slot: Ints) -> Ints:
        return self.block_in_slot[slot // self.unroll] * self.unroll + slot % self.unroll

    def holds(self, first: Ints, count: int) -> NDArray[np.bool_]:
        last = first + count - 1
        blocks = first // self.unroll + np.arange((count - 1) // self.unroll + 2)[:, None]
        there = self.slot_of_block[np.minimum(blocks, last // self.unroll)] >= 0
        return there.all(0) & (last <= self.newest)

    def state_slot(self, step: Ints) -> Ints:
        return self.slot_of_block[step // self.unroll]

    def _evict(self, last: int, on_evict: Callable[[range], None]) -> None:
        for block in range((self.newest + self.unroll) // self.unroll, last // self.unroll + 1):
            if block >= len(self.slot_of_block):
                self.slot_of_block = np.concatenate([self.slot_of_block, np.full_like(self.slot_of_block, -1)])
            slot = len(self.block_in_slot)
            if (slot + 1) * self.unroll > self.slots:
                slot = self._lowest_priority(block)
                lost = self.block_in_slot[slot]
                on_evict(range(lost * self.unroll, (lost + 1) * self.unroll))
                self.slot_of_block[lost] = -1
                self.block_in_slot[slot] = block
            else:
                self.block_in_slot = np.append(self.block_in_slot, block)
            self.slot_of_block[block] = slot

    def _lowest_priority(self, block: int) -> int:
        """The slot of the block whose items have the lowest sum of priorities; the oldest of equals."""
        newest = block - 1 - -(-self.item // self.unroll)  # that may be evicted
        order = np.argsort(self.block_in_slot)
        order = order[self.block_in_slot[order] <= newest]
        blocks = len(self.block_in_slot)
        total = self.priorities()[: blocks * self.unroll].reshape(blocks, -1).sum(1)
        return int(order[total[order].argmin()])

    def state_dict(self) -> Snapshot:  # keys as in checkpoints of 0.1
        tables = {"where": torch.from_numpy(self.slot_of_block), "lies": torch.from_numpy(self.block_in_slot)}
        return super().state_dict() | tables

    def load_state_dict(self, state: Snapshot) -> None:
        super().load_state_dict(state)
        self.slot_of_block, self.block_in_slot = state["where"].clone().numpy(), state["lies"].clone().numpy()


def storage_like(count: int, like: Tensor) -> Tensor:
    """Zeros for `count` tensors of this shape and type."""
    return torch.zeros(count, *like.shape, dtype=like.dtype)


def storage_bytes(capacity: int, spec: Spec, aux: int, state: State, every: int) -> int:
    """Bytes of a full ring buffer: `aux` bytes kept with each step, and a recurrent state (none: ()) `every` steps."""
    return capacity * (step_bytes(spec) + aux) + capacity // every * tree.size(state)


class RingReplay(SampledReplay):
    """A replay that samples from a ring buffer."""

    aligned = True
    ring: RingBuffer

    @property
    def bytes(self) -> int:
        return self.ring.bytes

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        raise AssertionError("a replay of transitions stores no value targets")

    def metrics(self) -> dict[str, float]:
        return self.ring.metrics() | self.rate_limiter.metrics()

    def state_dict(self) -> Snapshot:
        return self.rate_limiter.state_dict() | self.ring.state_dict() | {"streams": self.ring.streams}

    def load_ring(self, state: Snapshot) -> bool:
        """Returns whether the steps were loaded: with another number of environments only the counters are."""
        self.rate_limiter.load_state_dict(state)
        if state["streams"] != self.ring.streams:
            self.rate_limiter.last_added = 0
            return False
        self.ring.load_state_dict(state)
        return True
