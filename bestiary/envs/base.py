"""What every environment family promises."""

from typing import Any, NamedTuple, Protocol

from bestiary.envs.env_batch import EnvBatch


class References(NamedTuple):
    """Between which figures a result lies: what can be had at all, and what can be had without memory."""

    metric: str  # "score" or "success": which figure is meant
    optimal: float
    memoryless: float

    def __str__(self) -> str:
        return f"{self.metric}: optimal {round(self.optimal, 3)}, without memory {round(self.memoryless, 3)}"


def references(env: Any) -> References | None:
    """Of an environment's settings; None where nothing is known."""
    return getattr(env, "references", None)


def for_evaluation(env: Any) -> Any:
    """The same environment without what only makes training quicker."""
    plain = getattr(env, "for_evaluation", None)
    return env if plain is None else plain()


def advice(env: Any, algo: Any) -> list[str]:
    """What a user should know before anything is learnt from this environment by this algorithm."""
    known = getattr(env, "advice", None)
    return [] if known is None else known(getattr(algo, "reward_clip", "none"))


class EnvConfig(Protocol):
    """An environment is a frozen dataclass of numbers that makes batches of itself.

    `seed` and `stream` address its random numbers: worlds of different streams never meet.
    """

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch: ...
