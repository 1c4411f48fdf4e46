"""Algorithms. One file each; a new one is its file and its name in this union."""

from bestiary.algos.dqn import Dqn
from bestiary.algos.impala import Impala
from bestiary.algos.sac_discrete import SacDiscrete

AlgoConfig = Impala | Dqn | SacDiscrete
