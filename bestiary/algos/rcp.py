"""Reward-Conditioned Policies (Kumar et al. 2019): conditioned on returns (RCP-R) or advantages (RCP-A)."""

from dataclasses import dataclass, field
from typing import Literal

from bestiary.algos.return_conditioned import ReturnConditioned
from bestiary.config.schema import Numbers, advanced
from bestiary.replay.episodes import Episodes


def recent_transitions() -> Episodes:
    return Episodes(keep="recent", capacity=200, sample_by="transitions")


@dataclass(frozen=True)
class Rcp(ReturnConditioned):
    """Reward-Conditioned Policies: actions conditioned on advantages (RCP-A) or returns (RCP-R)."""

    command: Literal["return-to-go", "return", "advantage"] = "advantage"
    horizon: bool = False
    discount: float = 0.99
    replay: Episodes = field(default_factory=recent_transitions)
    fixed_command: bool = advanced(True)
    command_source: Literal["uniform", "episode", "percentile", "maximum"] = "percentile"
    weighting: Literal["none", "exponential"] = "exponential"
    command_shift: Numbers = advanced((0.0,))
    command_scale: Numbers = advanced((1.0,))
