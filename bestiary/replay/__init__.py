"""Replays, one file per kind. Each has settings that users see as `algo.replay`, a builder, and the replay itself."""

from bestiary.replay.episodes import Episodes
from bestiary.replay.fifo import Fifo
from bestiary.replay.prioritized import Prioritized
from bestiary.replay.uniform import Uniform

ReplayConfig = Fifo | Uniform | Prioritized | Episodes
