"""Prioritized replay of transitions (Schaul et al. 2016) or of sequences (Kapturowski et al. 2019)."""
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree
from bestiary.config.machine import SMALL_BYTES, check_memory
from bestiary.config.schema import Count
from bestiary.errors import UserError
from bestiary.ops.priorities import importance_weights
from bestiary.replay.base import step_bytes
from bestiary.replay.rate_limiter import RateLimiter
from bestiary.replay.ring_buffer import Ints, PriorityEvictionRing, RingBuffer, RingReplay, storage_bytes
from bestiary.replay.sum_tree import SumTree
from bestiary.seeding import REPLAY, derive
from bestiary.types import Batch, Snapshot, Spec, State, Trajectory, within_episode


@dataclass(frozen=True)
class Prioritized:
    """Prioritized sampling of single transitions or of sequences: P(i) = p_i^alpha / sum_k p_k^alpha."""

    batch_size: int = 512
    """transitions or sequences per update (Ape-X 512, R2D2 64)"""
    capacity: Count = 1_000_000
    """replay capacity in transitions, over all environments (Ape-X 2M)"""
    warmup: Count = 50_000
    """transitions collected before the first update (Ape-X 50k)"""
    updates_per_step: float = 0.0015
    """gradient updates per environment step"""
    priority_exponent: float = 0.6
    """priority exponent alpha: 0 = uniform sampling, 1 = fully proportional (Ape-X 0.6, R2D2 0.9)"""
    importance_exponent: float = 0.4
    """importance sampling exponent beta of weights (1 / (N P(i)))^beta: 1 = full correction (Ape-X 0.4, R2D2 0.6)"""
    priority_floor: float = 1e-6
    """lowest priority, so that transitions of zero TD error are still sampled"""
    sequence_length: int | None = None
    """transitions per sequence, burn-in included (R2D2 120 = 40 + 80); None: single transitions, after the burn-in"""
    stride: int | None = None
    """transitions between the starts of two sequences; None: sequence length - burn-in, so that each is trained once"""
    stored_state: bool | None = False
    """sequences begin with the actor's stored state (R2D2); None: if it takes up to 1 GiB or no more than all steps"""
    eta: float = 1.0
    """priority of a sequence: eta max |TD error| + (1 - eta) mean |TD error| (R2D2 0.9)"""
    eviction: Literal["fifo", "priority"] = "fifo"
    """what a full replay overwrites: the oldest transitions (fifo), or the trajectory of the lowest priority"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"algo.replay.batch-size={self.batch_size} must be at least 1")
        if self.updates_per_step <= 0:
            raise UserError(f"algo.replay.updates-per-step={self.updates_per_step} must be positive")
        for name in ("priority_exponent", "importance_exponent", "eta"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"algo.replay.{name.replace('_', '-')}={value} must lie in [0, 1]")
        if self.priority_floor <= 0:
            raise UserError(f"algo.replay.priority-floor={self.priority_floor} must be positive")

    def trained_length(self, burn_in: int) -> int:
        """Transitions of an item that are trained: those after the burn-in."""
        return 1 if self.sequence_length is None else self.sequence_length - burn_in

    def check_sequences(self, burn_in: int, n_step: int, unroll: int) -> None:
        """Refuse sequences that are too short, or that begin where no recurrent state is stored."""
        if self.sequence_length is not None and burn_in + n_step > self.sequence_length:
            raise UserError(
                f"algo.burn-in={burn_in} and algo.n-step={n_step} are longer than "
                f"algo.replay.sequence-length={self.sequence_length}: raise that to {burn_in + n_step} or more"
            )
        stride = self.trained_length(burn_in) if self.stride is None else self.stride
        if stride < 1:
            raise UserError(f"algo.replay.stride={stride} must be at least 1")
        if self.stored_state is not False and stride % unroll:
            raise UserError(
                f"algo.replay.stride={stride} must be a multiple of algo.unroll={unroll}: "
                "recurrent state is stored where unrolls begin"
            )


class PrioritizedReplay(RingReplay):
    """An item is a number of consecutive steps of one stream, beginning at every `stride`-th step.

    Item numbers never repeat: item k of a stream begins with step k * stride, and its weight (priority to the power of
    alpha) is in the sum tree at the slot of that step. A new priority for an item that has been overwritten meanwhile
    is recognised by the item's number and dropped. An item's initial priority is computed from what the actor recorded,
    once its last step is there.
    """

    def __init__(self, builder: "PrioritizedBuilder", seed: int) -> None:
        self.builder, self.cfg = builder, builder.cfg
        self.streams, self.stride, self.item_steps = builder.streams, builder.stride, builder.item_steps
        self.seed = derive(seed, REPLAY)
        cfg = self.cfg
        keep_states = bool(cfg.stored_state)
        if cfg.eviction == "fifo":
            self.ring = RingBuffer(self.streams, cfg.capacity, keep_states)
        else:
            self.ring = PriorityEvictionRing(self.streams, cfg.capacity, keep_states, self.item_steps, self._weights)
        self.rate_limiter = RateLimiter(cfg.updates_per_step, cfg.warmup)
        self.tree = SumTree(self.ring.slots * self.streams)
        self.next = 0  # number of the next item to be complete
        self.items = 0  # held
        self.late = 0  # new priorities for items that were already overwritten

    # -- add ---------------------------------------------------------------------------------------------------------

    def add(self, trajectory: Trajectory, stream: int = 0) -> None:
        self.ring.add(trajectory, self._remove_items)
        self.rate_limiter.add(int(within_episode(trajectory.step.is_first).sum()))
        end = max(self.next, (self.ring.newest + 1 - self.item_steps) // self.stride + 1)
        complete = self._held(np.arange(self.next, end))  # an item may be overwritten as soon as it is complete
        if len(complete):
            self._add_items(complete)
        self.next = end

    def _held(self, items: Ints) -> Ints:
        """Those of the items all of whose steps are there."""
        return items[self.ring.holds(items * self.stride, self.item_steps)]

    def _remove_items(self, steps: range) -> None:
        """Set the weights of items that contain one of these steps to zero."""
        first = max(0, -(-(steps.start - self.item_steps + 1) // self.stride))
        lost = self._held(np.arange(first, min((steps.stop - 1) // self.stride + 1, self.next)))
        slots = self._slots(lost[:, None], np.arange(self.streams)).flatten()
        self.tree.set(slots, np.zeros(len(slots)))
        self.items -= len(slots)

    def _weights(self) -> NDArray[np.float64]:
        return self.tree.leaves().reshape(-1, self.streams)

    def _add_items(self, items: Ints) -> None:
        item, stream = (x.flatten() for x in np.meshgrid(items, np.arange(self.streams), indexing="ij"))
        t = self.ring.gather(self._steps(item), stream, with_obs=False)
        priority = self.builder.initial_priorities(t)
        trained = slice(self.builder.burn_in, self.builder.burn_in + self.builder.length)
        valid = within_episode(t.step.is_first)[trained]
        # an item without a transition inside an episode is never sampled
        weight = np.where(valid.any(0).numpy(), self._weight(priority), 0.0)
        self.tree.set(self._slots(item, stream), weight)
        self.items += len(item)

    def _weight(self, priority: Tensor) -> NDArray[np.float64]:
        """priority^alpha. NaN stays NaN, which the tree refuses: NaN^0 would be 1."""
        floored = np.maximum(priority.detach().cpu().double().numpy(), self.cfg.priority_floor)
        return np.where(np.isnan(floored), np.nan, floored**self.cfg.priority_exponent)

    def _slots(self, item: Ints, stream: Ints) -> Ints:
        """Where the weights of items are in the tree."""
        return self.ring.slot(item * self.stride) * self.streams + stream

    def _steps(self, item: Ints) -> Ints:
        return item * self.stride + np.arange(self.item_steps)[:, None]

    # -- sample ------------------------------------------------------------------------------------------------------

    def sample(self) -> Batch | None:
        rng = self.next_rng()
        if rng is None:
            return None
        cfg, burn_in = self.cfg, self.builder.burn_in
        leaves, weight = self.tree.sample(cfg.batch_size, rng)
        slot, stream = np.divmod(leaves, self.streams)
        item = self.ring.step_in(slot) // self.stride
        t = self.ring.gather(self._steps(item), stream)
        start = item * self.stride
        probability = torch.from_numpy(weight / self.tree.total)
        known = cfg.stored_state and burn_in and burn_in % self.ring.unroll == 0
        return Batch(
            t._replace(state=self.ring.state_at(start, stream)),
            torch.from_numpy(item * self.streams + stream),
            importance_weights(probability, len(self), cfg.importance_exponent).float(),
            self.ring.state_at(start + burn_in, stream) if known else (),
            {"max_importance_weight": ((len(self) * probability.min()) ** -cfg.importance_exponent).float()},
        )

    def __len__(self) -> int:
        """Items held."""
        return self.items

    def is_empty(self) -> bool:
        return self.tree.total == 0.0

    def update_priorities(self, keys: Tensor, priorities: Tensor) -> None:
        item, stream = np.divmod(keys.numpy(), self.streams)
        weight, held = self._weight(priorities), self.ring.holds(item * self.stride, self.item_steps)
        self.late += int((~held).sum())
        self.tree.set(self._slots(item, stream)[held], weight[held])

    def metrics(self) -> dict[str, float]:
        """replay_ratio: how often a transition is trained on average (Kapturowski et al. 2019)."""
        batches, steps = self.rate_limiter.batches, max(1, self.rate_limiter.steps)
        return {
            **super().metrics(),
            "replay_ratio": batches * self.cfg.batch_size * self.builder.length / steps,
            "late_priorities": self.late,
        }

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> Snapshot:
        counters = {"next": self.next, "items": self.items, "late": self.late}
        return super().state_dict() | counters | {"weights": torch.from_numpy(self.tree.leaves())}

    def load_state_dict(self, state: Snapshot) -> None:
        self.late = state["late"]
        if self.load_ring(state):
            self.next, self.items = state["next"], state["items"]
            self.tree.rebuild(state["weights"].numpy())


@dataclass(frozen=True)
class PrioritizedBuilder:
    cfg: Prioritized
    streams: int
    unroll: int  # recurrent state is stored once per unroll
    burn_in: int
    n_step: int  # an item ends with the n steps that the last target needs
    initial_priorities: Callable[[Trajectory], Tensor]
    """steps of new items, [item_steps, B], without observations -> their initial priorities, [B]"""

    @property
    def length(self) -> int:
        """Transitions of an item that are trained."""
        return self.cfg.trained_length(self.burn_in)

    @property
    def stride(self) -> int:
        """Steps between the starts of two items."""
        return self.length if self.cfg.stride is None else self.cfg.stride

    @property
    def item_steps(self) -> int:
        return self.burn_in + self.length + self.n_step

    def __post_init__(self) -> None:
        cfg, steps = self.cfg, self.item_steps
        if cfg.capacity < self.streams * steps:
            raise UserError(
                f"algo.replay.capacity={cfg.capacity} cannot hold one sequence of {steps} steps for each of "
                f"{self.streams} environments: raise it to {self.streams * steps}"
            )
        blocks, needed = (1 + cfg.capacity // self.streams) // self.unroll, 1 + -(-steps // self.unroll)
        if cfg.eviction == "priority" and blocks < needed:
            raise UserError(
                f"algo.replay.capacity={cfg.capacity} is too small for --algo.replay.eviction priority: "
                f"raise it to {needed * self.unroll * self.streams}, or use fifo"
            )
        least = self.streams * steps + cfg.batch_size * self.stride
        if cfg.warmup < least:
            raise UserError(
                f"algo.replay.warmup={cfg.warmup} transitions do not hold a batch of {cfg.batch_size} items: "
                f"raise it to {least}"
            )

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

    def build(self, seed: int, spec: Spec | None = None, state: State = ()) -> PrioritizedReplay:
        cfg, every = self.cfg, max(self.unroll, 1)
        stored = cfg.stored_state
        if spec is not None:
            aux = 4 * spec.num_actions  # bytes of the Q-values kept with each step
            if stored is None:
                steps = storage_bytes(cfg.capacity, spec, aux, (), every)
                stored = tree.size(state) * (cfg.capacity // every) <= max(steps, SMALL_BYTES)
            check_memory(storage_bytes(cfg.capacity, spec, aux, state if stored else (), every), cfg.capacity)
        return PrioritizedReplay(replace(self, cfg=replace(cfg, stored_state=bool(stored))), seed)
