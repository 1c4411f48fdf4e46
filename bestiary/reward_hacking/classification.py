"""Quality of anomaly scores as a binary classifier of runs: AUROC, AUPR, FPR95 and F1."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bestiary.config.extras import require


class DetectorQuality(NamedTuple):
    auroc: float
    aupr: float
    fpr95: float
    f1: float


class ThresholdCounts(NamedTuple):
    """Numbers of flagged runs at every threshold, from none to all. Runs with equal scores are flagged together."""

    true_positives: NDArray[np.int64]  # [K + 1]
    false_positives: NDArray[np.int64]  # [K + 1]


def threshold_counts(score: ArrayLike, anomalous: Sequence[bool]) -> ThresholdCounts:
    x, positive = np.asarray(score, float), np.asarray(anomalous, bool)
    thresholds = np.unique(x)[::-1]
    tp, fp = (len(of) - np.searchsorted(np.sort(of), thresholds) for of in (x[positive], x[~positive]))
    return ThresholdCounts(np.append(0, tp), np.append(0, fp))


def auroc(score: ArrayLike, anomalous: Sequence[bool]) -> float:
    """P(score of an anomalous run > score of a normal run) + P(equal) / 2: the Mann-Whitney U statistic over n m."""
    require("scipy", "report")
    from scipy.stats import rankdata

    positive = np.asarray(anomalous, bool)
    n, m = positive.sum(), (~positive).sum()
    return float((rankdata(score)[positive].sum() - n * (n + 1) / 2) / (n * m))


def aupr(c: ThresholdCounts) -> float:
    """Average precision: the sum over thresholds of precision times the increase of recall."""
    precision = c.true_positives[1:] / (c.true_positives + c.false_positives)[1:]
    return float((np.diff(c.true_positives) * precision).sum() / c.true_positives[-1])


def fpr95(c: ThresholdCounts) -> float:
    """The false positive rate at a true positive rate of at least 95 %."""
    at = np.argmax(c.true_positives / c.true_positives[-1] >= 0.95)
    return float(c.false_positives[at] / c.false_positives[-1])


def best_f1(c: ThresholdCounts) -> float:
    """The F1 score at the best threshold."""
    return float((2 * c.true_positives / (c.true_positives + c.false_positives + c.true_positives[-1])).max())


def detector_quality(score: ArrayLike, anomalous: Sequence[bool]) -> DetectorQuality | None:
    """None if all runs have the same label: then the metrics are undefined."""
    if len(set(anomalous)) < 2:
        return None
    c = threshold_counts(score, anomalous)
    return DetectorQuality(auroc(score, anomalous), aupr(c), fpr95(c), best_f1(c))
