"""Return-conditioned policies: what Upside-Down RL and Reward-Conditioned Policies share."""

from bestiary.algos.return_conditioned.config import ReturnConditioned as ReturnConditioned
