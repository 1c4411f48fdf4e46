"""What every environment family promises."""

from typing import Protocol

from bestiary.envs.world import World


class EnvConfig(Protocol):
    """An environment is a frozen dataclass of numbers that makes batches of itself.

    `seed` and `stream` address its random numbers: worlds of different streams never meet.
    """

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> World: ...
