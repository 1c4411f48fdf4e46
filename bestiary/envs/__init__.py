"""Environments, one file per family. A new environment is added as a file and as a member of `EnvConfig`."""

from bestiary.envs.atari import Atari
from bestiary.envs.catch import Catch
from bestiary.envs.gym import Gym
from bestiary.envs.lunar_lander import LunarLander
from bestiary.envs.memory import KeyToDoor, TMaze, VisualMatch
from bestiary.envs.recall import Recall
from bestiary.envs.riverraid import Riverraid

EnvConfig = Recall | Catch | TMaze | VisualMatch | KeyToDoor | LunarLander | Gym | Atari | Riverraid
