"""Statistics of scores: interquartile mean and bootstrap confidence intervals (Agarwal et al. 2021)."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def iqm(scores: ArrayLike, axis: int = -1) -> np.ndarray:
    """Interquartile mean: the mean of the middle half, with fractional weights at its edges.

    Of n sorted scores, the one of rank i covers the interval from i - 1 to i, and its weight is the part of it between
    n/4 and 3n/4. So exactly half of the weight is trimmed for any n; trimming whole scores would have to round.
    """
    x = np.sort(np.asarray(scores, float), axis)
    n = x.shape[axis]
    left = np.arange(n, dtype=np.int64)
    weight = np.clip(np.minimum(left + 1, 0.75 * n) - np.maximum(left, 0.25 * n), 0, None)
    return np.tensordot(x, weight / weight.sum(), (axis, 0))


def bootstrap_interval(scores: ArrayLike, resamples: int = 10_000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap confidence interval of the mean. The resampling is seeded: same scores, same interval."""
    low, high = stratified_bootstrap([scores], np.mean, resamples, level)
    return float(low), float(high)


def stratified_bootstrap(
    groups: Sequence[ArrayLike], statistic: Callable[..., np.ndarray], resamples: int = 2_000, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Stratified bootstrap confidence interval of a statistic over the scores of several groups, such as tasks.

    A group is [seeds, ...]. Seeds are resampled within their group, so that every task keeps its weight. The statistic
    is computed over all seeds, `statistic(scores, axis=...)`, for each of the remaining entries.
    """
    rng = np.random.default_rng(0)
    scores = [np.asarray(group, float) for group in groups]
    samples = [x[rng.integers(0, len(x), (resamples, len(x)))] for x in scores]
    statistics = statistic(np.concatenate(samples, axis=1), axis=1)  # [resamples, ...]
    low, high = np.quantile(statistics, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def summary(scores: ArrayLike) -> dict[str, float | int]:
    """Number, mean with its 95% confidence interval, median, interquartile mean, standard deviation and range."""
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
