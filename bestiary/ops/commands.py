"""Equations of return-conditioned policies: return-to-go, command distributions, exponential weights."""
# pyright: reportUnknownMemberType=false

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
def returns_to_go(
    reward: NDArray[np.float32],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    first: NDArray[np.int64],
    window: int,
    discount: float,
) -> Floats:  # pragma: no cover - compiled
    """Discounted return from each of `window` time steps to the end of the episode, [window, B]; 0 outside the episode.

    reward: [N], of many episodes one after the other. An episode of `length` transitions begins at `start`, and the
    reward of its transition t is at start + t + 1. `first`: the time step with which the window begins, which may be
    negative.
    """
    out = np.zeros((window, len(start)))
    for b in range(len(start)):
        total = 0.0
        for t in range(length[b] - 1, max(first[b], 0) - 1, -1):
            total = reward[start[b] + t + 1] + discount * total
            if t < first[b] + window:
                out[t - first[b], b] = total
    return out


def top_episodes(score: Floats, count: int, distinct: bool = False) -> NDArray[np.int64]:
    """Indices of the highest scores, highest first; of equal scores the later one. distinct: only one of them."""
    order = np.lexsort((-np.arange(len(score)), -score))
    if distinct:
        _, at = np.unique(-score[order], return_index=True)
        order = order[np.sort(at)]
    return order[:count]


class CommandDistribution(NamedTuple):
    """A command is a row of `pool` chosen uniformly, plus U(0, spread), plus N(0, noise^2)."""

    pool: Tensor  # [K, W]
    spread: Tensor  # [W]
    noise: Tensor  # [W]


def command_distribution(
    pool: Floats, spread: Floats | float = 0.0, noise: Floats | float = 0.0
) -> CommandDistribution:
    pool = np.atleast_2d(pool)
    widened = [np.broadcast_to(np.asarray(x, np.float64), pool.shape[1:]) for x in (spread, noise)]
    return CommandDistribution(*(torch.from_numpy(np.array(x, np.float32)) for x in (pool, *widened)))


def next_command(command: Tensor, reward: Tensor, discount: float, max_return: float) -> Tensor:
    """The command after a transition, [B, W]: desired return d <- (d - r) / discount, desired horizon h <- h - 1.

    The desired return is at most `max_return`, the desired horizon at least 1 (Srivastava et al. 2019).
    """
    desired_return = ((command[:, 0] - reward) / discount).clamp(max=max_return)
    desired_horizon = (command[:, 1:] - 1).clamp(min=1)
    return torch.cat([desired_return[:, None], desired_horizon], 1)


def zscore(x: Tensor, valid: Tensor | None = None, moments: Callable[[Tensor], Moments] = moments) -> Tensor:
    """(x - mean) / standard deviation (of a sample) over valid entries; 0 where all are equal.

    moments: computes both; with several learners over the entries of all of them.
    """
    number, mean, std = moments(x.flatten() if valid is None else x[valid])
    if number < 2:
        return torch.zeros_like(x)
    return torch.where(std > 0, (x - mean) / std.clamp(min=torch.finfo(x.dtype).tiny), 0)


def exponential_weight(z: Tensor, beta: float, cap: float) -> Tensor:
    """min(exp(z / beta), cap), as in advantage-weighted regression (Peng et al. 2019)."""
    return (z / beta).exp().clamp(max=cap)


def subtract_start_baseline(returns: Floats, start: Floats, ridge: float = 1.0) -> Floats:
    """Returns minus a linear fit (ridge regression) on the first observations [E, D], to remove the start's luck."""
    x = start - start.mean(0)
    x = x / np.maximum(x.std(0), 1e-6)
    y = returns - returns.mean()
    gram: Floats = x.T @ x + ridge * np.eye(x.shape[1])
    products: Floats = x.T @ y
    slope = np.linalg.solve(gram, products)
    return returns - x @ slope
