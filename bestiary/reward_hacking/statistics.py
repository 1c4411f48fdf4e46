"""Statistics of a study: means with intervals over seeds, correlations, and change-points of the true return."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bestiary.config.extras import require
from bestiary.ops.stats import stratified_bootstrap

RESAMPLES = 2_000
FRAMES_TOLERANCE = 0.02  # checkpoints are saved at the next update, not at the exact frame: these are treated as equal
MIN_POINTS = 3  # of a change-point search and of a correlation: any two points lie on a line
LEVEL = 0.05  # significance level

Row = Mapping[str, Any]  # the evaluation of one checkpoint of one run in one mode, as in study.json
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over n seeds or runs; low and high are None for n = 1."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: ArrayLike) -> Estimate:
    """Mean and 95 % percentile bootstrap interval. The resampling is seeded: equal values give equal intervals."""
    x = np.asarray(values, float)
    if len(x) < 2:
        return Estimate(float(x.mean()), None, None, len(x))
    low, high = stratified_bootstrap([x], np.mean, RESAMPLES)
    return Estimate(float(x.mean()), float(low), float(high), len(x))


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def run_means(rows: Iterable[Row], key: str) -> Floats:
    """The mean over episodes of every row."""
    return np.array([np.mean(row[key]) for row in rows], float)


def component_rates(rows: Iterable[Row], component: str) -> Floats:
    """The mean of a reward component per step, for every row that has it."""
    return np.array([sum(r["components"][component]) / sum(r["steps"]) for r in rows if component in r["components"]])


def align_checkpoints(rows: Sequence[Row]) -> list[Row]:
    """The same rows, with nearly equal frames of different runs made equal to the smallest of them."""
    nominal: dict[int, int] = {}
    first, runs_at_first = 0, set()
    for frames in sorted({row["frames"] for row in rows}):
        runs = {row["run"] for row in select(rows, frames=frames)}
        if frames > first * (1 + FRAMES_TOLERANCE) or runs & runs_at_first:
            first, runs_at_first = frames, set()
        nominal[frames] = first
        runs_at_first |= runs
    return [{**row, "frames": nominal[row["frames"]]} for row in rows]


def _pearson(x: Floats, y: Floats) -> Floats:
    """Pearson correlations over the last axis; NaN where one side is constant."""
    require("scipy", "report")
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (stats.ConstantInputWarning, stats.NearConstantInputWarning))
        return np.asarray(stats.pearsonr(x, y, axis=-1)[0])


def _spearman(x: Floats, y: Floats) -> Floats:
    """Spearman rank correlations over the last axis; tied values share the mean of their ranks."""
    require("scipy", "report")
    from scipy.stats import rankdata

    return _pearson(rankdata(x, axis=-1), rankdata(y, axis=-1))


def _defined(measure: Callable[[Floats, Floats], Floats], x: ArrayLike, y: ArrayLike) -> float | None:
    a, b = np.asarray(x, float), np.asarray(y, float)
    value = float(measure(a, b)) if len(a) >= MIN_POINTS else np.nan
    return None if np.isnan(value) else value


def pearson(x: ArrayLike, y: ArrayLike) -> float | None:
    """Pearson correlation; None for fewer than three pairs, or if one side is constant."""
    return _defined(_pearson, x, y)


def spearman(x: ArrayLike, y: ArrayLike) -> float | None:
    """Spearman rank correlation; None as for `pearson`."""
    return _defined(_spearman, x, y)


def correlation(x: ArrayLike, y: ArrayLike, ranks: bool = False) -> Estimate | None:
    """Pearson or (`ranks`) Spearman correlation with its bootstrap interval; undefined resamples do not count."""
    measure = _spearman if ranks else _pearson
    value = _defined(measure, x, y)
    if value is None:
        return None
    a, b = np.asarray(x, float), np.asarray(y, float)
    resamples = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    found = measure(a[resamples], b[resamples])
    found = found[~np.isnan(found)]
    if len(found) <= RESAMPLES / 2:
        return Estimate(value, None, None, len(a))
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(value, float(low), float(high), len(a))


class Split(NamedTuple):
    """The best change-point of each series: the split into two constant segments with the least squared error."""

    at: NDArray[np.intp]  # number of points before the change-point
    drop: Floats  # mean before minus mean after: positive if the series falls
    gain: Floats  # reduction of the squared error


def best_split(y: ArrayLike) -> Split:
    """The least-squares change-point of series [..., points].

    Segment means a and b of k and P - k points reduce the squared error by k (P - k) / P (a - b)^2.
    """
    series = np.asarray(y, float)
    P = series.shape[-1]
    k = np.arange(1, P)
    before = np.cumsum(series, -1)[..., :-1]
    drop = before / k - (series.sum(-1, keepdims=True) - before) / (P - k)  # [..., P - 1]
    gain = k * (P - k) / P * drop**2
    best = gain.argmax(-1, keepdims=True)
    return Split(
        *(np.take_along_axis(table, best, -1)[..., 0] for table in (np.broadcast_to(k, gain.shape), drop, gain))
    )


class ChangePoint(NamedTuple):
    """The change-point of the mean over seeds along an axis, with its uncertainty."""

    points: int
    seeds: int  # at the point with the fewest
    before: float  # the change-point lies between these two positions
    after: float
    shares: dict[tuple[float, float], float]  # position of the split -> share of resamples; empty for a single seed
    drop: Estimate
    p_value: float  # share of permutations with a fall at least as clear
    from_best: Estimate | None  # see `fall_from_best`


def change_over_sizes(x: Sequence[float], groups: Sequence[ArrayLike]) -> ChangePoint | None:
    """The change-point along network sizes, each with values of several seeds. Seeds are resampled within a size."""
    order = np.argsort(x)
    values = [np.asarray(groups[i], float) for i in order]
    if len(values) < MIN_POINTS:
        return None
    rng = np.random.default_rng(0)
    counts = [len(v) for v in values]
    resampled = [v[rng.integers(0, len(v), (RESAMPLES, len(v)))].mean(1) for v in values]
    permuted = rng.permuted(np.tile(np.concatenate(values), (RESAMPLES, 1)), axis=1)
    starts = np.cumsum([0, *counts[:-1]])
    permuted_means = np.add.reduceat(permuted, starts, axis=1) / counts
    best = fall_from_best(np.stack([v[: min(counts)] for v in values], -1))
    means = np.array([v.mean() for v in values])
    return _change_point([x[i] for i in order], means, np.stack(resampled, -1), permuted_means, min(counts), best)


def change_over_time(x: Sequence[float], y: ArrayLike) -> ChangePoint | None:
    """The change-point along training, of series [seeds, points]. A seed is resampled with all its checkpoints."""
    series = np.asarray(y, float)
    if series.size == 0 or series.shape[1] < MIN_POINTS:
        return None
    rng = np.random.default_rng(0)
    resampled = series[rng.integers(0, len(series), (RESAMPLES, len(series)))].mean(1)
    permuted_means = rng.permuted(np.tile(series, (RESAMPLES, 1, 1)), axis=2).mean(1)
    return _change_point(x, series.mean(0), resampled, permuted_means, len(series), fall_from_best(series))


def _change_point(
    x: Sequence[float], means: Floats, resampled: Floats, permuted: Floats, seeds: int, best: Estimate | None
) -> ChangePoint:
    found, over_resamples, over_permutations = best_split(means), best_split(resampled), best_split(permuted)
    at, drop = int(found.at), float(found.drop)
    # a split is always the best of many, so noise has one too: a permutation test compares it with series without order
    as_clear = (over_permutations.drop > 0) & (over_permutations.gain >= found.gain * (1 - 1e-9))
    p_value = (1 + as_clear.sum()) / (1 + len(permuted)) if drop > 0 else 1.0
    shares: dict[tuple[float, float], float] = {}
    low = high = None
    if seeds > 1:
        splits, count = np.unique(over_resamples.at, return_counts=True)
        shares = {(x[k - 1], x[k]): float(n / len(resampled)) for k, n in zip(splits, count, strict=True)}
        low, high = (float(q) for q in np.quantile(over_resamples.drop, [0.025, 0.975]))
    drop_estimate = Estimate(drop, low, high, seeds)
    return ChangePoint(len(x), seeds, x[at - 1], x[at], shares, drop_estimate, float(p_value), best)


def fall_from_best(y: ArrayLike) -> Estimate | None:
    """The value at the best point minus the value at the last point, of series [seeds, points].

    The maximum of a noisy series is biased upwards. So the best point of each seed is chosen by the other seeds.
    """
    series = np.asarray(y, float)
    if len(series) < 2:
        return None
    others = (series.sum(0) - series) / (len(series) - 1)
    return estimate(np.take_along_axis(series, others.argmax(1)[:, None], 1)[:, 0] - series[:, -1])


def falls(change: ChangePoint | None) -> bool:
    """Whether there is evidence of a fall: the interval excludes 0, and the permutation test is significant."""
    return change is not None and change.drop.low is not None and change.drop.low > 0 and change.p_value <= LEVEL


def verdict(change: ChangePoint | None) -> str:
    none = "No evidence of a fall: "
    if change is None:
        return f"{none}there are fewer than {MIN_POINTS} points."
    if change.drop.low is None or change.drop.high is None:
        return f"{none}one seed has no interval."
    if change.drop.high < 0:
        return f"{none}the best split is a rise."
    if change.drop.low <= 0:
        return f"{none}the interval of the drop includes 0."
    if change.p_value > LEVEL:
        return f"{none}{change.p_value:.0%} of permutations fall as clearly."
    return "Evidence of a fall."
