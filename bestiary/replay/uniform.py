"""Experience kept for long and drawn at random: whole episodes or windows, a fixed number of times per move."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.errors import UserError
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, State, TimeStep, Trajectory

Rows = Any  # a tree of tensors [rows, streams, ...]


class UniformReplay:
    """Every row is stored once, in a ring per stream; all streams turn together.

    Rows carry numbers that never repeat: row n lies in slot n % slots. A trajectory's last row is the first row of the
    next, so it is written twice, with the same content; the version is that of the trajectory it opens.
    """

    def __init__(self, cfg: "Uniform", seed: int) -> None:
        self.cfg = cfg
        self.seed = derive(seed, REPLAY)
        self.slots = 1 + max(1, cfg.capacity // cfg.streams)  # of the ring: moves, and the row the last one leads to
        self.rows: Rows = None
        self.states: State = ()  # memory at the start of each trajectory, [trajectories, streams, ...]
        self.unroll = 0
        self.newest = -1  # the last row stored
        self.moves = 0  # ever added
        self.batches = 0  # ever given out
        self.latest = 0  # moves of the last trajectory
        self.opened = np.zeros(cfg.streams, np.int64)  # the row where each stream's episode began
        # finished episodes in order of their ends: stream, first row, number of rows
        self.episodes = np.zeros((0, 3), np.int64)

    # -- in ------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, priorities: Tensor | None = None) -> None:
        unroll = len(trajectory.action) - 1
        version = trajectory.version.expand(unroll + 1, -1)
        rows = (trajectory.step, trajectory.action, trajectory.aux, version)
        if self.rows is None:
            self._allocate(trajectory, rows)
        assert unroll == self.unroll, "trajectories of one length only"
        start = max(self.newest, 0)  # the first row of this trajectory is the last of the one before
        where = torch.arange(start, start + unroll + 1) % self.slots
        tree.map(lambda store, new: store.index_copy_(0, where, new.to(store.device)), self.rows, rows)
        if self.cfg.stored_state:
            at = start // unroll % len(self.states[0])
            for store, new in zip(self.states, trajectory.state, strict=True):
                store[at].copy_(new)
        is_first = trajectory.step.is_first.cpu().numpy()
        # usually it goes on from the row before; after an interruption other episodes begin here
        self.opened = np.where(is_first[0], start, self.opened)
        fresh = is_first[1:]
        self._close_episodes(start, fresh)
        self.newest = start + unroll
        self.latest = int((~fresh).sum())
        self.moves += self.latest

    def _allocate(self, t: Trajectory, rows: Rows) -> None:
        self.unroll = len(t.action) - 1
        window = self.cfg.window or 1
        whole = -(-window // self.unroll) * self.unroll  # trajectories that a window spans
        for name, needed in (("unroll", self.unroll), ("window", whole if self.cfg.stored_state else window)):
            if needed >= self.slots:
                raise UserError(
                    f"algo.capacity={self.cfg.capacity} holds {self.slots - 1} moves for each of {self.cfg.streams} "
                    f"environments, fewer than the {needed} that --algo.{name} needs: raise it, or lower that"
                )

        def room(count: int, like: Tensor) -> Tensor:
            return torch.zeros(count, *like.shape, dtype=like.dtype)

        self.rows = tree.map(lambda x: room(self.slots, x[0]), rows)
        if self.cfg.stored_state:
            self.states = tree.map(lambda x: room(self.slots // self.unroll + 1, x), t.state)

    def _close_episodes(self, start: int, fresh: NDArray[np.bool_]) -> None:
        ended = []
        for row, stream in np.argwhere(fresh):
            first, after = self.opened[stream], start + 1 + row
            ended.append((stream, first, after - first))
            self.opened[stream] = after
        oldest = start + len(fresh) - self.slots + 1
        alive = self.episodes[self.episodes[:, 1] >= oldest]
        new = np.array(ended, np.int64).reshape(-1, 3)
        self.episodes = np.concatenate([alive, new[(new[:, 1] >= oldest) & (new[:, 2] > 1)]])

    # -- out -----------------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """Updates the moves so far allow that have not been made."""
        return self.cfg.ratio * self.moves - self.batches if self.moves >= self.cfg.warmup else 0.0

    def _starts(self, window: int) -> range:
        """Rows a window can begin with: any; with stored memory, those where a trajectory began."""
        step = self.unroll if self.cfg.stored_state and self.unroll else 1
        oldest = max(0, self.newest - self.slots + 1)
        return range(-(-oldest // step) * step, self.newest - window + 1, step)

    def _is_empty(self) -> bool:
        """Nothing to draw from: no episode has ended yet, or no window is long enough."""
        return not (len(self.episodes) if self.cfg.window is None else self._starts(self.cfg.window))

    def sample(self) -> Batch | None:
        if self.due < 1 or self._is_empty():
            return None
        # a draw has an address, so there is no generator to save
        rng = np.random.Generator(np.random.Philox(key=[self.seed, self.batches]))
        self.batches += 1
        return self._whole(rng) if self.cfg.window is None else self._windows(rng, self.cfg.window)

    def _whole(self, rng: np.random.Generator) -> Batch:
        stream, first, length = self.episodes[rng.integers(len(self.episodes), size=self.cfg.batch_size)].T
        row = np.arange(length.max())[:, None]
        # an episode that is over goes on as its first row: a run of one-row episodes, from which nothing is learnt
        return Batch(self._gather(first + np.where(row < length, row, 0), stream))

    def _windows(self, rng: np.random.Generator, window: int) -> Batch:
        """Any rows in a row, episodes' borders included."""
        starts = self._starts(window)
        stream = rng.integers(self.cfg.streams, size=self.cfg.batch_size)
        first = starts.start + rng.integers(len(starts), size=self.cfg.batch_size) * starts.step
        t = self._gather(first + np.arange(window + 1)[:, None], stream)
        if self.cfg.stored_state:
            at = torch.from_numpy(first // starts.step % len(self.states[0]))
            t = t._replace(state=tree.map(lambda s: s[at, torch.from_numpy(stream)], self.states))
        return Batch(t)

    def _gather(self, row: NDArray[np.int64], stream: NDArray[np.int64]) -> Trajectory:
        at = torch.from_numpy(row % self.slots * self.cfg.streams + stream)
        flat = at.flatten()
        step, action, aux, version = tree.map(
            lambda store: store.flatten(0, 1).index_select(0, flat).unflatten(0, at.shape), self.rows
        )
        return Trajectory(step, action, aux, (), version[0])

    def update(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("all rows are equally likely")

    @property
    def full(self) -> bool:
        # while nothing can be drawn, waiting would be for ever
        return self.due >= 1 and self.due > self.cfg.ratio * self.latest and not self._is_empty()

    def metrics(self) -> dict[str, float]:
        held = min(self.newest + 1, self.slots) * self.cfg.streams
        return {"replay_rows": held, "updates_per_step": self.batches / max(1, self.moves)}

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        state: Snapshot = {
            "newest": self.newest,
            "moves": self.moves,
            "batches": self.batches,
            "latest": self.latest,
            "opened": self.opened.tolist(),
            "episodes": self.episodes.tolist(),
            "unroll": self.unroll,
        }
        if self.rows is not None:
            # a part of a tensor would be saved with all the room around it
            held = self.newest + 1
            step, *rest = tree.map(lambda x: x[:held].clone() if held < self.slots else x, self.rows)
            state |= {"rows": [tuple(step), *rest], "states": self.states}
        return state

    def load_state_dict(self, state: Snapshot) -> None:
        self.moves, self.batches = state["moves"], state["batches"]
        if len(state["opened"]) != self.cfg.streams:  # played on with another number of environments: rows do not fit
            return
        for name in ("newest", "latest", "unroll"):
            setattr(self, name, state[name])
        self.opened = np.array(state["opened"], np.int64)
        self.episodes = np.array(state["episodes"], np.int64).reshape(-1, 3)
        if "rows" in state:
            step, *rest = state["rows"]
            held = (TimeStep(*step), *rest)
            self.rows = tree.map(lambda x: torch.zeros(self.slots, *x.shape[1:], dtype=x.dtype), held)
            tree.map(lambda store, x: store[: len(x)].copy_(x), self.rows, held)
            self.states = tuple(state["states"])


@dataclass(frozen=True)
class Uniform:
    """Random rows of the recent past, drawn as often as the ratio says."""

    streams: int
    """environments played at once"""
    batch_size: int
    capacity: int
    """moves kept"""
    window: int | None
    """moves per sample; None: whole episodes"""
    ratio: float
    """updates per move"""
    warmup: int
    """moves before the first update"""
    stored_state: bool = False
    """windows begin with the memory the actor had there; else with an empty one"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.batch-size={self.batch_size} must be at least 1")
        if self.window is not None and self.window < 1:
            raise UserError(f"algo.window={self.window} must be at least 1 move, or None for whole episodes")
        if self.ratio <= 0:
            raise UserError(f"algo.ratio={self.ratio} must be positive")
        if self.warmup < 0:
            raise UserError(f"algo.warmup={self.warmup} must be at least 0")
        if self.stored_state and self.window is None:
            raise UserError("algo.stored-state needs windows: whole episodes begin with an empty memory anyway")
        needed = self.batch_size * (self.window or 1)
        if self.capacity < needed:
            raise UserError(f"algo.capacity={self.capacity} is too small for one batch: it needs {needed} moves")

    def build(self, seed: int, horizon: int | None = None) -> UniformReplay:
        replay = UniformReplay(self, seed)
        if self.window is None and horizon is not None and horizon >= replay.slots:
            raise UserError(
                f"algo.capacity={self.capacity} holds {replay.slots - 1} moves for each of {self.streams} "
                f"environments, but an episode can have {horizon}: raise it to {horizon * self.streams}, "
                "or set --algo.window"
            )
        return replay
