"""Experience kept for long and drawn at random: whole episodes or windows, a fixed number of times per move."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bestiary.config.machine import check_memory
from bestiary.errors import UserError
from bestiary.replay.base import row_bytes
from bestiary.replay.ring_buffer import RateLimiter, Ring, RingReplay, bytes_needed
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, Spec, State, Trajectory


class UniformReplay(RingReplay):
    """Draws from a ring of rows: any finished episode, or any window, is as likely as any other."""

    def __init__(self, cfg: "Uniform", seed: int) -> None:
        self.cfg = cfg
        self.seed = derive(seed, REPLAY)
        self.ring = Ring(cfg.streams, cfg.capacity, cfg.stored_state)
        self.rate_limiter = RateLimiter(cfg.ratio, cfg.warmup)
        self.opened = np.full(cfg.streams, -1)  # the row where each stream's episode began; -1: before what is kept
        # finished episodes in order of their ends: stream, first row, number of rows
        self.episodes = np.zeros((0, 3), np.int64)

    # -- in ------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        unroll = len(trajectory.action) - 1
        if self.ring.rows is None and self.cfg.window is not None:
            whole = -(-self.cfg.window // unroll) * unroll  # trajectories that a window spans
            self.ring.check_room(window=whole if self.cfg.stored_state else self.cfg.window)
        start = self.ring.add(trajectory)
        is_first = trajectory.step.is_first.cpu().numpy()
        # usually it goes on from the row before; after an interruption other episodes begin here
        self.opened = np.where(is_first[0], start, self.opened)
        fresh = is_first[1:]
        self._close_episodes(start, fresh)
        self.rate_limiter.add(int((~fresh).sum()))

    def _close_episodes(self, start: int, fresh: NDArray[np.bool_]) -> None:
        ended = []
        for row, stream in np.argwhere(fresh):
            first, after = self.opened[stream], start + 1 + row
            if first >= 0:
                ended.append((stream, first, after - first))
            self.opened[stream] = after
        oldest = self.ring.oldest
        alive = self.episodes[self.episodes[:, 1] >= oldest]
        new = np.array(ended, np.int64).reshape(-1, 3)
        self.episodes = np.concatenate([alive, new[(new[:, 1] >= oldest) & (new[:, 2] > 1)]])

    # -- out -----------------------------------------------------------------------------------------

    def _starts(self, window: int) -> range:
        """Rows a window can begin with: any; with stored memory, those where a trajectory began."""
        step = self.ring.unroll if self.cfg.stored_state and self.ring.unroll else 1
        return range(-(-self.ring.oldest // step) * step, self.ring.newest - window + 1, step)

    def is_empty(self) -> bool:
        """Nothing to draw from: no episode has ended yet, or no window is long enough."""
        return not (len(self.episodes) if self.cfg.window is None else self._starts(self.cfg.window))

    def sample(self) -> Batch | None:
        rng = self.next_draw()
        if rng is None:
            return None
        return self._whole(rng) if self.cfg.window is None else self._windows(rng, self.cfg.window)

    def _whole(self, rng: np.random.Generator) -> Batch:
        stream, first, length = self.episodes[rng.integers(len(self.episodes), size=self.cfg.batch_size)].T
        row = np.arange(length.max())[:, None]
        # an episode that is over goes on as its first row: a run of one-row episodes, from which nothing is learnt
        return Batch(self.ring.gather(first + np.where(row < length, row, 0), stream))

    def _windows(self, rng: np.random.Generator, window: int) -> Batch:
        """Any rows in a row, episodes' borders included."""
        starts = self._starts(window)
        stream = rng.integers(self.cfg.streams, size=self.cfg.batch_size)
        first = starts.start + rng.integers(len(starts), size=self.cfg.batch_size) * starts.step
        t = self.ring.gather(first + np.arange(window + 1)[:, None], stream)
        return Batch(t._replace(state=self.ring.state_at(first, stream)))

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("a uniform replay has no priorities")

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        return super().state_dict() | {"opened": self.opened.tolist(), "episodes": self.episodes.tolist()}

    def load_state_dict(self, state: Snapshot) -> bool:
        fits = super().load_state_dict({"streams": len(state["opened"]), **state})
        if fits:
            self.opened = np.array(state["opened"], np.int64)
            self.episodes = np.array(state["episodes"], np.int64).reshape(-1, 3)
        return fits


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
    unroll: int = 1
    """moves of a trajectory: how often memory is kept"""

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

    def share(self, parts: int, learners: int = 1) -> Self:
        kept = {"capacity": self.capacity // parts, "warmup": self.warmup // parts}
        return replace(self, **kept, ratio=self.ratio * learners)

    def nbytes(self, spec: Spec, unroll: int) -> int:
        return self.capacity * row_bytes(spec)

    def build(self, seed: int, spec: Spec | None = None, state: State = ()) -> UniformReplay:
        replay = UniformReplay(self, seed)
        horizon, slots = None if spec is None else spec.horizon, replay.ring.slots
        if self.window is None and horizon is not None and horizon >= slots:
            raise UserError(
                f"algo.capacity={self.capacity} holds {slots - 1} moves for each of {self.streams} "
                f"environments, but an episode can have {horizon}: raise it to {horizon * self.streams}, "
                "or set --algo.window"
            )
        if spec is not None:
            kept = state if self.stored_state else ()
            check_memory(bytes_needed(self.capacity, spec, 0, kept, self.unroll), self.capacity)
        return replay
