"""Algorithms. One file each; a new one is its file and its name in this union."""

from bestiary.algos.apex import Apex
from bestiary.algos.dqn import Dqn
from bestiary.algos.impala import Impala
from bestiary.algos.r2d2 import R2d2
from bestiary.algos.rcp import Rcp
from bestiary.algos.sac_discrete import SacDiscrete
from bestiary.algos.udrl import Udrl

AlgoConfig = Impala | Dqn | Apex | R2d2 | SacDiscrete | Udrl | Rcp
