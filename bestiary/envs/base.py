"""The interface of environment settings, and the optional methods that settings may have."""

from typing import Any, NamedTuple, Protocol

from bestiary.envs.env_batch import EnvBatch


class References(NamedTuple):
    """Reference values of an environment: the optimal result, and the best result of an agent without memory."""

    metric: str  # the metric that the values belong to: "score" or "success"
    optimal: float
    memoryless: float

    def __str__(self) -> str:
        return f"{self.metric}: optimal {round(self.optimal, 3)}, without memory {round(self.memoryless, 3)}"


def references(env: Any) -> References | None:
    """The reference values of an environment, given its settings; None where they are unknown."""
    return getattr(env, "references", None)


def for_evaluation(env: Any) -> Any:
    """The settings of the same environment for evaluation: without options that only make training faster."""
    plain = getattr(env, "for_evaluation", None)
    return env if plain is None else plain()


def advice(env: Any, algo: Any) -> list[str]:
    """Warnings for the user about training this algorithm on this environment."""
    known = getattr(env, "advice", None)
    return [] if known is None else known(getattr(algo, "reward_clip", "none"))


class EnvConfig(Protocol):
    """Settings of an environment: a frozen dataclass that builds an `EnvBatch`.

    `seed` and `stream` (training, evaluation, ...) determine the random numbers: batches of different streams never
    share any. `threads` is the number of CPU threads that the batch may use.
    """

    def make(self, num_envs: int, seed: int, stream: int, threads: int) -> EnvBatch: ...
