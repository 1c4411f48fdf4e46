"""Where experience waits to be learnt from. One file per kind."""

from bestiary.replay.fifo import Fifo

ReplayConfig = Fifo
