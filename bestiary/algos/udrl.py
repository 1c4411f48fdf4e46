"""Upside-Down RL (Srivastava et al. 2019): actions are predicted from a desired return-to-go and a desired horizon."""

from dataclasses import dataclass

from bestiary.algos.return_conditioned import ReturnConditioned


@dataclass(frozen=True)
class Udrl(ReturnConditioned):
    """Upside-Down RL: supervised learning of actions conditioned on desired return-to-go and horizon."""
