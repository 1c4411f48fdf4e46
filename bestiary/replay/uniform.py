"""Uniform replay: whole episodes or sequences, each as likely as any other (Mnih et al. 2015)."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bestiary.config.machine import check_memory
from bestiary.config.schema import Count
from bestiary.errors import UserError
from bestiary.replay.base import step_bytes
from bestiary.replay.rate_limiter import RateLimiter
from bestiary.replay.ring_buffer import RingBuffer, RingReplay, storage_bytes
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, Spec, State, Trajectory, within_episode


@dataclass(frozen=True)
class Uniform:
    """Uniform sampling of whole episodes or sequences from the most recent transitions."""

    batch_size: int = 64
    """episodes or sequences per update"""
    capacity: Count = 1_000_000
    """replay capacity in transitions, over all environments"""
    warmup: Count = 1_000
    """transitions collected before the first update"""
    updates_per_step: float = 0.25
    """gradient updates per environment step (Mnih et al. 2015: 1/4)"""
    sequence_length: int | None = None
    """transitions per sequence, burn-in included; None: whole episodes"""
    stored_state: bool = False
    """sequences begin with the stored state of the actor's core (R2D2), else with the initial recurrent state"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.replay.batch-size={self.batch_size} must be at least 1")
        if self.sequence_length is not None and self.sequence_length < 1:
            raise UserError(
                f"algo.replay.sequence-length={self.sequence_length} must be at least 1 transition, "
                "or None for whole episodes"
            )
        if self.updates_per_step <= 0:
            raise UserError(f"algo.replay.updates-per-step={self.updates_per_step} must be positive")
        if self.warmup < 0:
            raise UserError(f"algo.replay.warmup={self.warmup} must be at least 0")
        if self.stored_state and self.sequence_length is None:
            raise UserError(
                "algo.replay.stored-state needs algo.replay.sequence-length: "
                "whole episodes begin with the initial recurrent state anyway"
            )
        self._check_capacity(self.batch_size * (self.sequence_length or 1))

    def _check_capacity(self, needed: int) -> None:
        if self.capacity < needed:
            raise UserError(
                f"algo.replay.capacity={self.capacity} is too small for one batch: it needs {needed} transitions"
            )

    def check_fits(self, spec: Spec) -> None:
        """Refuse what can never be sampled, where the longest episode is known."""
        if spec.horizon is None:
            return
        if self.sequence_length is not None and self.sequence_length > spec.horizon:
            raise UserError(
                f"algo.replay.sequence-length={self.sequence_length} is longer than any episode of {spec.name} "
                f"({spec.horizon} steps): use None for whole episodes"
            )
        self._check_capacity(self.batch_size * (self.sequence_length or spec.horizon))


class UniformReplay(RingReplay):
    """Samples from a ring buffer: any finished episode, or any sequence, is as likely as any other."""

    def __init__(self, cfg: Uniform, streams: int, seed: int) -> None:
        self.cfg, self.streams = cfg, streams
        self.seed = derive(seed, REPLAY)
        self.ring = RingBuffer(streams, cfg.capacity, cfg.stored_state)
        self.rate_limiter = RateLimiter(cfg.updates_per_step, cfg.warmup)
        self.episode_start = np.full(streams, -1)  # step at which each stream's episode began; -1: unknown
        # finished episodes in order of their ends: stream, first step, number of steps
        self.episodes = np.zeros((0, 3), np.int64)

    # -- add ---------------------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        unroll = len(trajectory.action) - 1
        length = self.cfg.sequence_length
        if self.ring.storage is None and length is not None:
            whole = -(-length // unroll) * unroll  # trajectories that a sequence spans
            self.ring.check_fits(**{"replay.sequence_length": whole if self.cfg.stored_state else length})
        start = self.ring.add(trajectory)
        is_first = trajectory.step.is_first.cpu()
        # usually the episode continues from the step before; after an interruption another one begins here
        self.episode_start = np.where(is_first[0].numpy(), start, self.episode_start)
        valid = within_episode(is_first).numpy()
        self._close_episodes(start, ~valid)
        self.rate_limiter.add(int(valid.sum()))

    def _close_episodes(self, start: int, boundary: NDArray[np.bool_]) -> None:
        ended: list[tuple[Any, Any, Any]] = []
        for t, stream in np.argwhere(boundary):
            first, next_first = self.episode_start[stream], start + 1 + t
            if first >= 0:
                ended.append((stream, first, next_first - first))
            self.episode_start[stream] = next_first
        oldest = self.ring.oldest
        kept = self.episodes[self.episodes[:, 1] >= oldest]
        new = np.array(ended, np.int64).reshape(-1, 3)
        self.episodes = np.concatenate([kept, new[(new[:, 1] >= oldest) & (new[:, 2] > 1)]])

    # -- sample ------------------------------------------------------------------------------------------------------

    def _starts(self, length: int) -> range:
        """Steps at which a sequence may begin: any; with stored state, those at which a trajectory began."""
        step = self.ring.unroll if self.cfg.stored_state and self.ring.unroll else 1
        return range(-(-self.ring.oldest // step) * step, self.ring.newest - length + 1, step)

    def is_empty(self) -> bool:
        """True when no episode has ended yet, or there are fewer steps than a sequence has."""
        return not (len(self.episodes) if self.cfg.sequence_length is None else self._starts(self.cfg.sequence_length))

    def sample(self) -> Batch | None:
        rng = self.next_rng()
        if rng is None:
            return None
        length = self.cfg.sequence_length
        return self._sample_episodes(rng) if length is None else self._sample_sequences(rng, length)

    def _sample_episodes(self, rng: np.random.Generator) -> Batch:
        stream, first, length = self.episodes[rng.integers(len(self.episodes), size=self.cfg.batch_size)].T
        t = np.arange(int(length.max()))[:, None]
        # shorter episodes are padded with their first step: a run of one-step episodes, which carry no loss
        return Batch(self.ring.gather(first + np.where(t < length, t, 0), stream))

    def _sample_sequences(self, rng: np.random.Generator, length: int) -> Batch:
        """Consecutive steps, which may span several episodes."""
        starts = self._starts(length)
        stream = rng.integers(self.streams, size=self.cfg.batch_size)
        first = starts.start + rng.integers(len(starts), size=self.cfg.batch_size) * starts.step
        t = self.ring.gather(first + np.arange(length + 1)[:, None], stream)
        return Batch(t._replace(state=self.ring.state_at(first, stream)))

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        raise AssertionError("a uniform replay has no priorities")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:  # keys as in checkpoints of 0.1
        return super().state_dict() | {"opened": self.episode_start.tolist(), "episodes": self.episodes.tolist()}

    def load_state_dict(self, state: Snapshot) -> None:
        if self.load_ring({"streams": len(state["opened"]), **state}):
            self.episode_start = np.array(state["opened"], np.int64)
            self.episodes = np.array(state["episodes"], np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class UniformBuilder:
    cfg: Uniform
    streams: int
    unroll: int  # recurrent state is stored once per unroll

    def share(self, parts: int, learners: int = 1) -> Self:
        cfg = replace(
            self.cfg,
            capacity=self.cfg.capacity // parts,
            warmup=self.cfg.warmup // parts,
            updates_per_step=self.cfg.updates_per_step * learners,
        )
        return replace(self, cfg=cfg)

    def nbytes(self, spec: Spec, unroll: int) -> int:
        return self.cfg.capacity * step_bytes(spec)

    def build(self, seed: int, spec: Spec | None = None, state: State = ()) -> UniformReplay:
        cfg = self.cfg
        replay = UniformReplay(cfg, self.streams, seed)
        horizon, slots = None if spec is None else spec.horizon, replay.ring.slots
        if cfg.sequence_length is None and horizon is not None and horizon >= slots:
            raise UserError(
                f"algo.replay.capacity={cfg.capacity} holds {slots - 1} transitions for each of {self.streams} "
                f"environments, but an episode can have {horizon}: raise it to {horizon * self.streams}, "
                "or set --algo.replay.sequence-length"
            )
        if spec is not None:
            stored = state if cfg.stored_state else ()
            check_memory(storage_bytes(cfg.capacity, spec, 0, stored, self.unroll), cfg.capacity)
        return replay
