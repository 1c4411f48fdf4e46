"""Where rows are kept: each once, in order, the oldest written over by the newest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.errors import UserError
from bestiary.replay.base import row_bytes
from bestiary.types import Snapshot, Spec, State, TimeStep, Trajectory, ValueTargets

Rows = Any  # a tree of tensors [rows, streams, ...]


class Ring:
    """A ring of rows per stream; all streams turn together.

    Rows carry numbers that never repeat: row n lies in slot n % slots. A trajectory's last row is the first row of the
    next, so it is written twice, with the same content; the version is that of the trajectory it opens. Memory is
    kept, where asked for, as it was at the start of each trajectory.
    """

    def __init__(self, streams: int, capacity: int, keep_states: bool) -> None:
        self.streams, self.capacity, self.keep_states = streams, capacity, keep_states
        self.slots = 1 + max(1, capacity // streams)  # moves, and the row the last one leads to
        self.rows: Rows = None
        self.states: State = ()  # [trajectories, streams, ...]
        self.unroll = 0
        self.newest = -1  # the last row stored

    @property
    def oldest(self) -> int:
        return max(0, self.newest - self.slots + 1)

    def place(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of rows."""
        return row % self.slots

    def number(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that lie in slots now."""
        return self.newest - (self.newest - place) % self.slots

    def holds(self, first: NDArray[np.int64], rows: int) -> NDArray[np.bool_]:
        """Whether all of so many rows, from these on, are there."""
        return (first >= self.oldest) & (first + rows - 1 <= self.newest)

    def state_place(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where memory just before rows with which trajectories began is kept."""
        return row // self.unroll % (self.slots // self.unroll + 1)

    def _make_room(self, last: int, forget: Callable[[range], None]) -> None:
        """Rows up to `last` are about to be written: say which will be lost."""
        lost = range(self.oldest, max(0, last - self.slots + 1))
        if lost:
            forget(lost)

    def check_room(self, **needed: int) -> None:
        """Refuse settings (flag=moves) that need more rows in a row than there are."""
        for name, moves in needed.items():
            if moves >= self.slots:
                raise UserError(
                    f"algo.capacity={self.capacity} holds {self.slots - 1} moves for each of {self.streams} "
                    f"environments, fewer than the {moves} that --algo.{name} needs: raise it, or lower that"
                )

    def add(self, trajectory: Trajectory, forget: Callable[[range], None] = lambda rows: None) -> int:
        """Returns the number of its first row; `forget` is told of rows just before they are written over."""
        unroll = len(trajectory.action) - 1
        version = trajectory.version.expand(unroll + 1, -1)
        rows = (trajectory.step, trajectory.action, trajectory.aux, version)
        if self.rows is None:
            self.check_room(unroll=unroll)
            self.unroll = unroll
            self.rows = tree.map(lambda x: room(self.slots, x[0]), rows)
            if self.keep_states:
                self.states = tree.map(lambda x: room(self.slots // unroll + 1, x), trajectory.state)
        assert unroll == self.unroll, "trajectories of one length only"
        start = max(self.newest, 0)  # the first row of this trajectory is the last of the one before
        self._make_room(start + unroll, forget)
        self.newest = start + unroll
        where = torch.from_numpy(self.place(np.arange(start, self.newest + 1)))
        tree.map(lambda store, new: store.index_copy_(0, where, new.to(store.device)), self.rows, rows)
        at = int(self.state_place(np.array(start)))
        for store, new in zip(self.states, trajectory.state if self.keep_states else (), strict=True):
            store[at].copy_(new)
        return start

    def gather(self, row: NDArray[np.int64], stream: NDArray[np.int64], seen: bool = True) -> Trajectory:
        """Rows [T, B] of streams [B], without memory; without what was seen if that is not needed."""
        at = torch.from_numpy(self.place(row) * self.streams + stream)
        flat = at.flatten()
        step, *rest = self.rows
        kept = (step if seen else step._replace(obs=step.is_first), *rest)
        step, action, aux, version = tree.map(
            lambda store: store.flatten(0, 1).index_select(0, flat).unflatten(0, at.shape), kept
        )
        return Trajectory(step, action, aux, (), version[0])

    def state_at(self, row: NDArray[np.int64], stream: NDArray[np.int64]) -> State:
        """Memory just before rows [B] with which trajectories began."""
        if not self.states:
            return ()
        at, column = torch.from_numpy(self.state_place(row)), torch.from_numpy(stream)
        return tree.map(lambda store: store[at, column], self.states)

    @property
    def bytes(self) -> int:
        """Of what is held, not of the room for it."""
        share = min(1.0, (self.newest + 1) / self.slots)
        return 0 if self.rows is None else int(share * tree.size((self.rows, self.states)))

    def metrics(self) -> dict[str, float]:
        return {"replay_rows": min(self.newest + 1, self.slots) * self.streams}

    def state_dict(self) -> Snapshot:
        state: Snapshot = {"newest": self.newest, "unroll": self.unroll}
        if self.rows is not None:
            # a part of a tensor would be saved with all the room around it
            held = self.newest + 1
            step, *rest = tree.map(lambda x: x[:held].clone() if held < self.slots else x, self.rows)
            state |= {"rows": [tuple(step), *rest], "states": self.states}
        return state

    def load_state_dict(self, state: Snapshot) -> None:
        self.newest, self.unroll = state["newest"], state["unroll"]
        if "rows" in state:
            step, *rest = state["rows"]
            held = (TimeStep(*step), *rest)
            self.rows = tree.map(lambda x: room(self.slots, x[0]), held)
            tree.map(lambda store, x: store[: len(x)].copy_(x), self.rows, held)
            self.states = tuple(state["states"])


class PriorityEvictionRing(Ring):
    """Not the oldest rows make room, but those worth least: a trajectory of all streams at a time.

    A block holds the rows of one trajectory; which block lies where is looked up. The newest blocks, of which nothing
    can be said yet, are spared.
    """

    def __init__(
        self, streams: int, capacity: int, keep_states: bool, rows: int, worth: Callable[[], NDArray[np.float64]]
    ) -> None:
        """rows: of an item; worth: -> [slots, streams], what may be lost with each row."""
        super().__init__(streams, capacity, keep_states)
        self.item, self.worth = rows, worth
        self.where = np.full(1_024, -1, np.int64)  # of every block there ever was; -1: given up, or not yet there
        self.lies: NDArray[np.int64] = np.zeros(0, np.int64)  # which block lies in each place

    @property
    def oldest(self) -> int:
        return int(self.lies.min()) * self.unroll if len(self.lies) else 0

    def place(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.where[row // self.unroll] * self.unroll + row % self.unroll

    def number(self, place: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.lies[place // self.unroll] * self.unroll + place % self.unroll

    def holds(self, first: NDArray[np.int64], rows: int) -> NDArray[np.bool_]:
        last = first + rows - 1
        span = first // self.unroll + np.arange((rows - 1) // self.unroll + 2)[:, None]
        return (self.where[np.minimum(span, last // self.unroll)] >= 0).all(0) & (last <= self.newest)

    def state_place(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.where[row // self.unroll]

    def _make_room(self, last: int, forget: Callable[[range], None]) -> None:
        for block in range((self.newest + self.unroll) // self.unroll, last // self.unroll + 1):
            if block >= len(self.where):
                self.where = np.concatenate([self.where, np.full_like(self.where, -1)])
            at = len(self.lies)
            if (at + 1) * self.unroll > self.slots:
                at = self._least(block)
                lost = self.lies[at]
                forget(range(lost * self.unroll, (lost + 1) * self.unroll))
                self.where[lost] = -1
                self.lies[at] = block
            else:
                self.lies = np.append(self.lies, block)
            self.where[block] = at

    def _least(self, block: int) -> int:
        """The place of the block worth least; of equals the oldest."""
        spared = block - 1 - -(-self.item // self.unroll)
        order = np.argsort(self.lies)
        order = order[self.lies[order] <= spared]
        worth = self.worth()[: len(self.lies) * self.unroll].reshape(len(self.lies), -1).sum(1)
        return int(order[worth[order].argmin()])

    def state_dict(self) -> Snapshot:
        return super().state_dict() | {"where": torch.from_numpy(self.where), "lies": torch.from_numpy(self.lies)}

    def load_state_dict(self, state: Snapshot) -> None:
        super().load_state_dict(state)
        self.where, self.lies = state["where"].clone().numpy(), state["lies"].clone().numpy()


def room(count: int, like: Tensor) -> Tensor:
    return torch.zeros(count, *like.shape, dtype=like.dtype)


def bytes_needed(capacity: int, spec: Spec, aux: int, state: State, every: int) -> int:
    """Of a full ring: `aux` bytes kept with each row, and memory (none: ()) `every` so many rows."""
    return capacity * (row_bytes(spec) + aux) + capacity // every * tree.size(state)


class RateLimiter:
    """How many updates are due: a fixed number per move, once there are enough moves."""

    def __init__(self, ratio: float, warmup: int) -> None:
        self.ratio, self.warmup = ratio, warmup
        self.moves = 0  # ever added
        self.batches = 0  # ever given out
        self.latest = 0  # moves of the last trajectory

    def add(self, moves: int) -> None:
        self.latest = moves
        self.moves += moves

    @property
    def due(self) -> float:
        """Updates the moves so far allow that have not been made."""
        return self.ratio * self.moves - self.batches if self.moves >= self.warmup else 0.0

    @property
    def behind(self) -> bool:
        """More is due than the last trajectory brought, so producers should wait; never for less than one update."""
        return self.due >= 1 and self.due > self.ratio * self.latest

    def metrics(self) -> dict[str, float]:
        return {"updates_per_step": self.batches / max(1, self.moves)}

    def state_dict(self) -> Snapshot:
        return {"moves": self.moves, "batches": self.batches, "latest": self.latest, "ratio": self.ratio}

    def load_state_dict(self, state: Snapshot) -> None:
        """With another ratio than before, as much is due as was, in proportion: the past is not made up for."""
        self.moves, self.batches, self.latest = state["moves"], state["batches"], state["latest"]
        before = state.get("ratio", self.ratio)  # not in checkpoints of 0.1
        if before != self.ratio:
            self.batches = max(0, round(self.batches * self.ratio / before))


class Drawn:
    """What replays that draw at random share, however they keep: draws by address, producers held back."""

    rate_limiter: RateLimiter
    seed: int

    def is_empty(self) -> bool:
        """Nothing can be drawn."""
        raise NotImplementedError

    def next_draw(self) -> np.random.Generator | None:
        """If one is due. A draw has an address, so there is no generator to save."""
        if self.rate_limiter.due < 1 or self.is_empty():
            return None
        self.rate_limiter.batches += 1
        return np.random.Generator(np.random.Philox(key=[self.seed, self.rate_limiter.batches - 1]))

    @property
    def full(self) -> bool:
        # while nothing can be drawn, waiting would be for ever
        return self.rate_limiter.behind and not self.is_empty()


class RingReplay(Drawn):
    """What replays over a ring share, however they draw."""

    aligned = True
    ring: Ring

    @property
    def bytes(self) -> int:
        return self.ring.bytes

    def set_value_targets(self, keys: Tensor, targets: ValueTargets) -> None:
        raise AssertionError("a replay of transitions stores no value targets")

    def metrics(self) -> dict[str, float]:
        return self.ring.metrics() | self.rate_limiter.metrics()

    def state_dict(self) -> Snapshot:
        return self.rate_limiter.state_dict() | self.ring.state_dict() | {"streams": self.ring.streams}

    def load_state_dict(self, state: Snapshot) -> bool:
        """Returns whether rows fit: with another number of environments only the counters go on."""
        self.rate_limiter.load_state_dict(state)
        if state["streams"] != self.ring.streams:
            self.rate_limiter.latest = 0
            return False
        self.ring.load_state_dict(state)
        return True
