"""Optional dependencies (extras): imported where they are used; an error names the extra that is missing."""

import importlib.util

from bestiary.errors import UserError

EXTRAS = {  # extra -> (a module that it installs, its purpose)
    "atari": ("ale_py", "Atari games"),
    "box2d": ("Box2D", "LunarLander and other Box2D tasks"),
    "envpool": ("envpool", "LunarLander environments in C++"),
    "plot": ("matplotlib", "figures"),
    "report": ("scipy", "reports of reward hacking"),
    "video": ("imageio_ffmpeg", "videos"),
    "wandb": ("wandb", "logging to Weights & Biases"),
    "ray": ("ray", "training on a cluster"),
    "sweep": ("optuna", "hyper-parameter search"),
    "scaling": ("simpy", "predictions for larger clusters"),
}


class MissingExtra(UserError):
    """A module of an extra is not installed."""


def available(extra: str) -> bool:
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(
            f'the extra "{extra}" ({EXTRAS[extra][1]}) is not installed: pip install "bestiary[{extra}]"'
        )
