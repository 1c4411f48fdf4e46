"""Honest summaries of scores."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def iqm(scores: ArrayLike, axis: int = -1) -> np.ndarray:
    """Interquartile mean: the mean of the middle half, with fractional weights at its edges.

    Of n sorted scores, the one of rank i covers the stretch from i - 1 to i, and weighs what of that lies between n/4
    and 3n/4. So exactly half of the weight is cut for any n, where leaving out whole scores would have to round.
    """
    x = np.sort(np.asarray(scores, float), axis)
    n = x.shape[axis]
    left = np.arange(n)
    weight = np.clip(np.minimum(left + 1, 0.75 * n) - np.maximum(left, 0.25 * n), 0, None)
    return np.tensordot(x, weight / weight.sum(), (axis, 0))


def bootstrap_interval(scores: ArrayLike, resamples: int = 10_000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean. The resampling is seeded: same scores, same interval."""
    low, high = stratified_bootstrap([scores], np.mean, resamples, level)
    return float(low), float(high)


def stratified_bootstrap(
    groups: Sequence[ArrayLike], statistic: Callable[..., np.ndarray], resamples: int = 2_000, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap interval of a statistic over the scores of several groups, such as seeds of tasks.

    A group is [seeds, ...] and is resampled among its own seeds, so that every task keeps its share. The statistic is
    taken over all seeds, `statistic(scores, axis=...)`, for each of the remaining entries.
    """
    rng = np.random.default_rng(0)
    scores = [np.asarray(group, float) for group in groups]
    drawn = [x[rng.integers(0, len(x), (resamples, len(x)))] for x in scores]
    statistics = statistic(np.concatenate(drawn, axis=1), axis=1)  # [resamples, ...]
    low, high = np.quantile(statistics, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def summary(scores: ArrayLike) -> dict[str, float | int]:
    x = np.asarray(scores, float)
    low, high = bootstrap_interval(x)
    return {
        "n": len(x),
        "mean": float(x.mean()),
        "ci95_low": low,
        "ci95_high": high,
        "median": float(np.median(x)),
        "iqm": float(iqm(x)),
        "std": float(x.std()),
        "min": float(x.min()),
        "max": float(x.max()),
    }
