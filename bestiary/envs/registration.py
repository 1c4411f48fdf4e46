"""Our environments under their Gymnasium names; Gymnasium calls this when it is imported."""

from typing import Any

NAMES = ("Recall", "Catch")


def register() -> None:
    import gymnasium as gym

    for name in NAMES:
        if f"bestiary/{name}-v0" not in gym.registry:
            gym.register(
                f"bestiary/{name}-v0",
                entry_point=f"bestiary.envs.registration:make_{name.lower()}",
                vector_entry_point=f"bestiary.envs.{name.lower()}:{name}Env",
                disable_env_checker=True,
                order_enforce=False,
            )


def make_recall(**kwargs: Any) -> Any:
    from bestiary.envs.batched import SingleEnv
    from bestiary.envs.recall import RecallEnv

    return SingleEnv(RecallEnv(1, **kwargs))


def make_catch(**kwargs: Any) -> Any:
    from bestiary.envs.batched import SingleEnv
    from bestiary.envs.catch import CatchEnv

    return SingleEnv(CatchEnv(1, **kwargs))
