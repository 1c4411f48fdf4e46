"""Speed of prioritized sampling: the sum tree against others, then the whole replay with images."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bestiary.algos import Apex
from bestiary.bench import medians
from bestiary.config.machine import tune_malloc
from bestiary.config.schema import Count
from bestiary.errors import UserError
from bestiary.ops.priorities import importance_weights
from bestiary.replay.prioritized import Prioritized, PrioritizedReplay
from bestiary.replay.sum_tree import SumTree
from bestiary.types import Spec, TimeStep, Trajectory

ALPHA, BETA, FLOOR = 0.6, 0.4, 1e-6
STREAMS, UNROLL = 32, 20
SMALL_BATCH = 32
SPEC = Spec("Pong", (1, 84, 84), torch.uint8, 6, 4)
ALWAYS = 1e9  # updates per step: one is always due

Side = Callable[[], object]
Priorities = Iterator[NDArray[np.float64]]


@dataclass(frozen=True)
class ReplayBench:
    """bestiary bench replay"""

    capacity: Count = 1_000_000
    """number of priorities in the comparison of trees"""
    batch: int = 512
    """batch size (Ape-X: 512)"""
    steps: Count = 100_000
    """capacity of the whole replay in transitions, 7 kB each"""
    batches: int = 100
    """batches that each alternative samples per round"""
    rounds: int = 9
    """rounds, in which the alternatives take turns; medians are reported"""

    def __post_init__(self) -> None:
        if min(self.capacity, self.batch, self.batches, self.rounds) < 1:
            raise UserError("capacity, batch, batches and rounds must be at least 1")
        least = max(STREAMS * UNROLL, warmup(self.batch))
        if self.steps < least:
            raise UserError(f"steps={self.steps} do not hold a batch of {self.batch}: raise it to {least}")


def warmup(batch: int) -> int:
    """Transitions before the first batch: the minimum that Ape-X allows, whose items have seven steps."""
    return STREAMS * 7 + max(batch, SMALL_BATCH)


def new_priorities(cfg: ReplayBench, batch: int) -> Priorities:
    """New priorities in a cycle, so that generating them costs no alternative any time."""
    return cycle(np.random.default_rng(1).random((cfg.batches, batch)))


# -- the tree -------------------------------------------------------------------------------------------------------
# Each alternative samples a batch (stratified), computes importance sampling weights, and sets new priorities, which it
# raises to the power of alpha itself.


def with_tree(tree: SumTree, cfg: ReplayBench, batch: int) -> Side:
    rng, priorities = np.random.default_rng(0), new_priorities(cfg, batch)

    def run() -> None:
        for _ in range(cfg.batches):
            slots, weight = tree.sample(batch, rng)
            importance_weights(torch.from_numpy(weight / tree.total), tree.capacity, BETA).float()
            tree.set(slots, np.maximum(next(priorities), FLOOR) ** ALPHA)

    return run


def with_sums(cfg: ReplayBench, weights: NDArray[np.float64]) -> Side:
    """The naive way: cumulative sums of all priorities for every batch."""
    weights = weights.copy()
    rng, priorities = np.random.default_rng(0), new_priorities(cfg, cfg.batch)

    def run() -> None:
        for _ in range(cfg.batches):
            ends = np.cumsum(weights)
            points = (np.arange(cfg.batch) + rng.random(cfg.batch)) / cfg.batch * ends[-1]
            slots = np.minimum(np.searchsorted(ends, points, "right"), len(ends) - 1)
            importance_weights(torch.from_numpy(weights[slots] / ends[-1]), len(weights), BETA).float()
            weights[slots] = np.maximum(next(priorities), FLOOR) ** ALPHA

    return run


def with_cpprb(cfg: ReplayBench, first: NDArray[np.float64]) -> Side | None:
    """cpprb's prioritized buffer with items of a single number; None: it is not installed."""
    try:
        cpprb: Any = import_module("cpprb")
    except ImportError:
        return None
    buffer = cpprb.PrioritizedReplayBuffer(cfg.capacity, {"obs": {"shape": 1}}, alpha=ALPHA, eps=FLOOR)
    buffer.add(obs=np.zeros((cfg.capacity, 1), np.float32), priorities=first)
    priorities = new_priorities(cfg, cfg.batch)

    def run() -> None:
        for _ in range(cfg.batches):
            sampled = buffer.sample(cfg.batch, beta=BETA)
            buffer.update_priorities(sampled["indexes"], next(priorities))

    return run


def trees(cfg: ReplayBench) -> dict[str, float]:
    """Batches per second of every alternative."""
    first = np.random.default_rng(2).random(cfg.capacity)
    weights = np.maximum(first, FLOOR) ** ALPHA
    tree = SumTree(cfg.capacity)
    tree.rebuild(weights)
    sides = {"tree": with_tree(tree, cfg, cfg.batch)}
    other = with_cpprb(cfg, first)
    if other is None:
        print("cpprb is not installed, so nothing is compared with it: pip install cpprb\n")
    else:
        sides["cpprb"] = other
    sides["sums"] = with_sums(cfg, weights)
    return {name: cfg.batches / s for name, s in medians(sides, cfg.rounds).items()}


# -- the whole replay -----------------------------------------------------------------------------------------------


def full_replay(cfg: ReplayBench, batch: int) -> PrioritizedReplay:
    """A full Ape-X replay with random images."""
    settings = Prioritized(batch, cfg.steps, warmup(batch), updates_per_step=ALWAYS)
    algo = Apex(replay=settings, unroll=UNROLL)
    replay = algo.replay_builder(STREAMS).build(0, SPEC)
    rng, shape = torch.Generator().manual_seed(0), (UNROLL + 1, STREAMS)
    no, action = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    obs = torch.randint(0, 256, (*shape, *SPEC.obs_shape), dtype=torch.uint8, generator=rng)
    step = TimeStep(obs, action, torch.zeros(shape), no, no)
    while replay.ring.newest < replay.ring.slots:
        q = torch.randn(*shape, SPEC.num_actions, generator=rng)
        replay.add(Trajectory(step, action, {"q": q}, (), action[0]))
    return replay


def whole(cfg: ReplayBench, batch: int) -> dict[str, float]:
    """Microseconds per batch of the whole replay, of its sum tree alone and of copying the time steps alone."""
    replay = full_replay(cfg, batch)
    rng, priorities = np.random.default_rng(0), new_priorities(cfg, batch)
    sampled = cycle([np.divmod(replay.tree.sample(batch, rng)[0], STREAMS) for _ in range(cfg.batches)])
    offsets = np.arange(replay.item_steps)[:, None]

    def sample_and_update() -> None:
        for _ in range(cfg.batches):
            sample = replay.sample()
            assert sample is not None
            assert sample.keys is not None
            replay.update_priorities(sample.keys, torch.from_numpy(next(priorities)))

    def copy() -> None:
        for _ in range(cfg.batches):
            slot, stream = next(sampled)
            replay.ring.gather(replay.ring.step_in(slot) + offsets, stream)

    sides = {"whole": sample_and_update, "tree": with_tree(replay.tree, cfg, batch), "copying": copy}
    micros = {name: 1e6 * s / cfg.batches for name, s in medians(sides, cfg.rounds).items()}
    return micros | {"rate": 1e6 / micros["whole"], "share": micros["copying"] / micros["whole"]}


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def main(cfg: ReplayBench) -> dict[str, Any]:
    tune_malloc()
    torch.set_num_threads(1)
    console = Console(width=110)
    rates = trees(cfg)
    title = f"sample {cfg.batch} of {cfg.capacity:,}, compute weights, set new priorities: one thread"
    table = new_table(title, "", "batches/s", "speed-up by the tree")
    names = {"tree": "sum tree", "cpprb": "cpprb", "sums": "NumPy, cumulative sums"}
    for side, rate in rates.items():
        table.add_row(names[side], f"{rate:,.0f}", "" if side == "tree" else f"{rates['tree'] / rate:.1f}x")
    console.print(table)
    results: dict[str, Any] = {"sampling": rates}
    title = f"Ape-X, 84x84 images, capacity {cfg.steps:,} transitions: sample and update, one thread"
    table = new_table(title, "batch", "batches/s", "µs", "sum tree alone", "copying alone", "copying / whole")
    for batch in (cfg.batch, SMALL_BATCH):
        r = results[f"apex-{batch}"] = whole(cfg, batch)
        numbers = [f"{r[k]:,.0f}" for k in ("rate", "whole", "tree", "copying")]
        table.add_row(str(batch), *numbers, f"{100 * r['share']:.0f}%")
    console.print(table)
    return results
