"""Optional parts: imported where used, and named in the error when missing."""

import importlib.util

from bestiary.errors import UserError

EXTRAS = {  # extra -> (module that shows it is there, what it is for)
    "atari": ("ale_py", "Atari games"),
    "box2d": ("Box2D", "LunarLander and other Box2D tasks"),
    "envpool": ("envpool", "LunarLanders stepped in C++"),
    "plot": ("matplotlib", "pictures of curves"),
    "video": ("imageio_ffmpeg", "videos"),
    "wandb": ("wandb", "logging to Weights & Biases"),
    "ray": ("ray", "training on a cluster"),
    "sweep": ("optuna", "hyper-parameter search"),
    "onnx": ("onnx", "export"),
}


class MissingExtra(UserError):
    pass


def available(extra: str) -> bool:
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(f'{EXTRAS[extra][1]} need the extra "{extra}": pip install "bestiary[{extra}]"')
