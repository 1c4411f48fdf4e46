"""What commands are made of: what was still to come, what the best episodes were like, and how to weigh the rest."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary.ops.collective import Moments, moments
from bestiary.ops.jit import compiler

Floats = NDArray[np.float64]


@compiler()
def to_go(
    reward: NDArray[np.float32],
    first: NDArray[np.int64],
    moves: NDArray[np.int64],
    start: NDArray[np.int64],
    window: int,
    discount: float,
) -> Floats:  # pragma: no cover - compiled
    """What was still earned from each of `window` rows on, [window, B]; 0 outside the episode.

    reward: [rows] of many episodes one after the other; an episode's rows begin at `first`, and the reward of its
    move t lies in row t + 1. `start`: the row of the episode with which the window begins, which may lie before it.
    """
    out = np.zeros((window, len(first)))
    for b in range(len(first)):
        total = 0.0
        for t in range(moves[b] - 1, max(start[b], 0) - 1, -1):
            total = reward[first[b] + t + 1] + discount * total
            if t < start[b] + window:
                out[t - start[b], b] = total
    return out


def best(returns: Floats, count: int, distinct: bool = False) -> NDArray[np.int64]:
    """Indices of the best, in that order; of equals the later first. distinct: equal returns count once."""
    order = np.lexsort((-np.arange(len(returns)), -returns))
    if distinct:
        _, at = np.unique(-returns[order], return_index=True)
        order = order[np.sort(at)]
    return order[:count]


class Aim(NamedTuple):
    """Where commands are drawn from: one of `pool`, plus up to `spread`, plus normal noise."""

    pool: Tensor  # [K, W]
    spread: Tensor  # [W]
    noise: Tensor  # [W]


def aim(pool: Floats, spread: Floats | float = 0.0, noise: Floats | float = 0.0) -> Aim:
    pool = np.atleast_2d(pool)
    wide = [np.broadcast_to(np.asarray(x, np.float64), pool.shape[1:]) for x in (spread, noise)]
    return Aim(*(torch.from_numpy(np.array(x, np.float32)) for x in (pool, *wide)))


def reduce(command: Tensor, reward: Tensor, discount: float, most: float) -> Tensor:
    """What is still to be done after a move, [B, W]: less by what it earned, and by one move where moves count.

    No more than `most` can be asked for, and never fewer moves than one.
    """
    rest = ((command[:, 0] - reward) / discount).clamp(max=most)
    left = (command[:, 1:] - 1).clamp(min=1)
    return torch.cat([rest[:, None], left], 1)


def zscore(x: Tensor, valid: Tensor | None = None, moments: Callable[[Tensor], Moments] = moments) -> Tensor:
    """How many standard deviations (of a sample) from the mean; 0 where all are alike.

    moments: of those that count; more may be known of than are here.
    """
    number, mean, std = moments(x.flatten() if valid is None else x[valid])
    if number < 2:
        return torch.zeros_like(x)
    return torch.where(std > 0, (x - mean) / std.clamp(min=torch.finfo(x.dtype).tiny), 0)


def exponential_weight(z: Tensor, beta: float, cap: float) -> Tensor:
    """exp(z / beta), but no more than `cap`."""
    return (z / beta).exp().clamp(max=cap)


def less_start(returns: Floats, start: Floats, ridge: float = 1.0) -> Floats:
    """Returns less what a linear fit on the first observation, [E, D], says of them: luck at the start is no merit."""
    x = start - start.mean(0)
    x = x / np.maximum(x.std(0), 1e-6)
    y = returns - returns.mean()
    slope = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y)
    return returns - x @ slope
