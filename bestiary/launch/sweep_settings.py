"""Settings of a hyper-parameter sweep, apart from the sweep itself, which cannot be imported without Optuna."""

from dataclasses import dataclass
from typing import Literal

from bestiary.config.schema import Count


@dataclass(frozen=True)
class SweepSettings:
    """How a sweep searches, and what it compares trials by."""

    trials: Count = 20
    """total number of trials; the same command with a larger number continues the sweep"""
    seeds_per_trial: int = 2
    """seeds of each trial, counted from --seed; the value of a trial is the mean over them"""
    metric: Literal["score", "success"] = "score"
    """objective that is maximised: mean score or success rate of evaluations during training"""
    last: int = 1
    """number of evaluations, the last ones of a run, over which the metric is averaged"""
    sampler: Literal["tpe", "random"] = "tpe"
    """Optuna's sampler; tpe: tree-structured Parzen estimator (Bergstra et al. 2011), random: random search"""
    prune: bool = True
    """stop trials below the median of the others at the same step (Optuna's median pruner); needs --evaluation.every"""
