"""Where experience waits to be learnt from. One file per kind."""

from bestiary.replay.episodes import Episodes
from bestiary.replay.fifo import Fifo
from bestiary.replay.prioritized import Prioritized
from bestiary.replay.uniform import Uniform

ReplayConfig = Fifo | Uniform | Prioritized | Episodes
