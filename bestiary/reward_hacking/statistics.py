"""What the rows of a study say: means with intervals over seeds, correlations, and whether the true return falls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bestiary.ops.stats import stratified_bootstrap

RESAMPLES = 2_000
SAME = 0.02  # checkpoints this close to each other are one: runs stop at the next update, not at the frame
FEWEST = 3  # points of a split, pairs of a correlation: with two, a line fits anything
LEVEL = 0.05

Row = Mapping[str, Any]
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over n seeds or runs; a single one has no interval."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: ArrayLike) -> Estimate:
    """Mean and 95 % percentile bootstrap interval. The resampling is seeded: same values, same interval."""
    x = np.asarray(values, float)
    if len(x) < 2:
        return Estimate(float(x.mean()), None, None, len(x))
    low, high = stratified_bootstrap([x], np.mean, RESAMPLES)
    return Estimate(float(x.mean()), float(low), float(high), len(x))


def pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def run_means(rows: Iterable[Row], key: str) -> Floats:
    """The mean over games of every row."""
    return np.array([np.mean(row[key]) for row in rows], float)


def rates(rows: Iterable[Row], component: str) -> Floats:
    """How much of a component there is per step, in every row that knows it."""
    return np.array([sum(r["components"][component]) / sum(r["steps"]) for r in rows if component in r["components"]])


def checkpoints(rows: Sequence[Row]) -> list[Row]:
    """The same rows; nearly equal frames of different runs become equal, to the first of their kind."""
    nominal: dict[int, int] = {}
    first, there = 0, set()
    for frames in sorted({row["frames"] for row in rows}):
        runs = {row["run"] for row in pick(rows, frames=frames)}
        if frames > first * (1 + SAME) or runs & there:
            first, there = frames, set()
        nominal[frames] = first
        there |= runs
    return [{**row, "frames": nominal[row["frames"]]} for row in rows]


def pearson(x: ArrayLike, y: ArrayLike) -> float | None:
    """Correlation; None for fewer than three pairs, or when one side is always the same."""
    a, b = np.asarray(x, float), np.asarray(y, float)
    if len(a) < FEWEST or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    a, b = a - a.mean(), b - b.mean()
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1, 1))


def spearman(x: ArrayLike, y: ArrayLike) -> float | None:
    """Correlation of ranks: asks for order only, not for a straight line."""
    return pearson(ranks(x), ranks(y))


def ranks(x: ArrayLike) -> Floats:
    """From 1 for the smallest; equals share the mean of their ranks."""
    _, which, count = np.unique(np.asarray(x, float), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def correlation(
    x: ArrayLike, y: ArrayLike, measure: Callable[[ArrayLike, ArrayLike], float | None] = pearson
) -> Estimate | None:
    """A correlation over pairs with its bootstrap interval; resamples in which it is not defined do not count."""
    value = measure(x, y)
    if value is None:
        return None
    a, b = np.asarray(x, float), np.asarray(y, float)
    drawn = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    found = [r for i in drawn if (r := measure(a[i], b[i])) is not None]
    low, high = np.quantile(found, [0.025, 0.975]) if len(found) > RESAMPLES / 2 else (None, None)
    return Estimate(value, None if low is None else float(low), None if high is None else float(high), len(a))


class Split(NamedTuple):
    """Where a series is best cut in two, each side at its mean. Arrays, one entry per series."""

    at: NDArray[np.intp]  # how many points lie before the cut
    drop: Floats  # mean before less mean after: above 0 is a fall
    gain: Floats  # squared error that the cut saves


def best_split(y: ArrayLike) -> Split:
    """The cut with the least squared error, of series [..., points].

    Two means a and b of k and P - k points save k (P - k) / P (a - b)^2 of the error that one mean leaves.
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


class Change(NamedTuple):
    """The best cut of the mean over seeds along an axis, and how far it can be trusted."""

    points: int
    seeds: int  # at the point that has fewest
    before: float  # the cut lies between these two places
    after: float
    shares: dict[tuple[float, float], float]  # place of the cut -> share of resamples; empty for a single seed
    drop: Estimate
    chance: float  # share of shuffles that fall as clearly
    from_best: Estimate | None  # see fall_from_best


def change_over_sizes(x: Sequence[float], groups: Sequence[ArrayLike]) -> Change | None:
    """A cut along sizes, of the values of several seeds at each: every size has runs of its own."""
    order = np.argsort(x)
    values = [np.asarray(groups[i], float) for i in order]
    if len(values) < FEWEST:
        return None
    rng = np.random.default_rng(0)
    counts = [len(v) for v in values]
    drawn = [v[rng.integers(0, len(v), (RESAMPLES, len(v)))].mean(1) for v in values]
    shuffled = rng.permuted(np.tile(np.concatenate(values), (RESAMPLES, 1)), axis=1)
    starts = np.cumsum([0, *counts[:-1]])
    level = np.add.reduceat(shuffled, starts, axis=1) / counts
    best = fall_from_best(np.stack([v[: min(counts)] for v in values], -1))
    means = np.array([v.mean() for v in values])
    return _change([x[i] for i in order], means, np.stack(drawn, -1), level, min(counts), best)


def change_over_time(x: Sequence[float], y: ArrayLike) -> Change | None:
    """A cut along time, of series [seeds, points]: a seed is drawn with all of its checkpoints."""
    series = np.asarray(y, float)
    if series.size == 0 or series.shape[1] < FEWEST:
        return None
    rng = np.random.default_rng(0)
    drawn = series[rng.integers(0, len(series), (RESAMPLES, len(series)))].mean(1)
    shuffled = rng.permuted(np.tile(series, (RESAMPLES, 1, 1)), axis=2).mean(1)
    return _change(x, series.mean(0), drawn, shuffled, len(series), fall_from_best(series))


def _change(
    x: Sequence[float], means: Floats, drawn: Floats, shuffled: Floats, seeds: int, best: Estimate | None
) -> Change:
    found, resampled, by_chance = best_split(means), best_split(drawn), best_split(shuffled)
    at, drop = int(found.at), float(found.drop)
    # a cut is always the best of many, so noise too has one: shuffling tells how clear it is where there is no order
    as_clear = (by_chance.drop > 0) & (by_chance.gain >= found.gain * (1 - 1e-9))
    chance = (1 + as_clear.sum()) / (1 + len(shuffled)) if drop > 0 else 1.0
    shares: dict[tuple[float, float], float] = {}
    low = high = None
    if seeds > 1:
        cuts, count = np.unique(resampled.at, return_counts=True)
        shares = {(x[k - 1], x[k]): float(n / len(drawn)) for k, n in zip(cuts, count, strict=True)}
        low, high = (float(q) for q in np.quantile(resampled.drop, [0.025, 0.975]))
    return Change(len(x), seeds, x[at - 1], x[at], shares, Estimate(drop, low, high, seeds), float(chance), best)


def fall_from_best(y: ArrayLike) -> Estimate | None:
    """How far the last point lies below the best one, of [seeds, points].

    The best point of a noisy series is partly luck. So for each seed it is looked up in the mean of the others.
    """
    series = np.asarray(y, float)
    if len(series) < 2:
        return None
    others = (series.sum(0) - series) / (len(series) - 1)
    return estimate(np.take_along_axis(series, others.argmax(1)[:, None], 1)[:, 0] - series[:, -1])


def falls(change: Change | None) -> bool:
    """Whether there is evidence of a fall: the interval excludes 0, and shuffled runs seldom fall as clearly."""
    return change is not None and change.drop.low is not None and change.drop.low > 0 and change.chance <= LEVEL


def verdict(change: Change | None) -> str:
    none = "No evidence of a fall: "
    if change is None:
        return f"{none}there are fewer than {FEWEST} points."
    if change.drop.low is None or change.drop.high is None:
        return f"{none}one seed has no interval."
    if change.drop.high < 0:
        return f"{none}the best split is a rise."
    if change.drop.low <= 0:
        return f"{none}the interval of the drop includes 0."
    if change.chance > LEVEL:
        return f"{none}{change.chance:.0%} of shuffles fall as clearly."
    return "Evidence of a fall."
