"""Where experience waits to be learnt from. One file per kind."""

from bestiary.replay.fifo import Fifo
from bestiary.replay.uniform import Uniform

ReplayConfig = Fifo | Uniform
