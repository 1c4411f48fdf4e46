"""Reward-Conditioned Policies: ask for high returns (RCP-R) or advantages (RCP-A) (Kumar et al. 2019)."""

from dataclasses import dataclass
from typing import Literal

from bestiary.algos.return_conditioned.learner import Commanded
from bestiary.config.schema import Count, Numbers


@dataclass(frozen=True)
class Rcp(Commanded):
    """Asks for an advantage (RCP-A), or for a return (RCP-R); what turned out better counts more."""

    command: Literal["to-go", "return", "advantage"] = "advantage"
    horizon: bool = False
    discount: float = 0.99
    hold: bool = True
    source: Literal["spread", "episode", "percentile", "peak"] = "percentile"
    keep: Literal["best", "recent", "mixture"] = "recent"
    capacity: Count = 200
    draw: Literal["episodes", "moves"] = "moves"
    weighting: Literal["none", "exponential"] = "exponential"
    shift: Numbers = (0.0,)
    scale: Numbers = (1.0,)
