"""Honest summaries of scores."""

import numpy as np
from numpy.typing import ArrayLike


def iqm(scores: ArrayLike, axis: int = -1) -> np.ndarray:
    """Interquartile mean: the mean of the middle half, with fractional weights at its edges."""
    x = np.sort(np.asarray(scores, float), axis)
    n = x.shape[axis]
    left = np.arange(n)
    weight = np.clip(np.minimum(left + 1, 0.75 * n) - np.maximum(left, 0.25 * n), 0, None)
    return np.tensordot(x, weight / weight.sum(), (axis, 0))


def bootstrap_interval(scores: ArrayLike, resamples: int = 10_000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean. The resampling is seeded: same scores, same interval."""
    x = np.asarray(scores, float)
    means = x[np.random.default_rng(0).integers(0, len(x), (resamples, len(x)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


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
