"""Upside-Down RL: the return to reach and the time for it go in, the action comes out (Srivastava et al. 2019)."""

from dataclasses import dataclass

from bestiary.algos.return_conditioned.learner import Commanded


@dataclass(frozen=True)
class Udrl(Commanded):
    """Asks for what is still to be earned, and in how many moves; learns from the best episodes."""
