"""Reinforcement learning with memory: every algorithm, every memory, every environment."""

import os
from typing import TYPE_CHECKING, Any

from bestiary.config.registration import register_with_gymnasium

# PyTorch's OpenMP library reads this once, when it is loaded. Idle threads then spin only briefly and leave the cores
# to the threads of the emulators: acting alone became a quarter faster on two cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

register_with_gymnasium()

if TYPE_CHECKING:
    from bestiary.config.experiment import Experiment, register
    from bestiary.errors import UserError
    from bestiary.presets import PRESETS, preset
    from bestiary.training.evaluation import EvaluationProtocol, evaluate
    from bestiary.training.policy import Policy, load
    from bestiary.training.run import Run
    from bestiary.training.session import iterate, train
    from bestiary.training.video import video

_MODULES = {  # name -> module that is imported when the name is first used, so that `import bestiary` is quick
    "PRESETS": "bestiary.presets",
    "EvaluationProtocol": "bestiary.training.evaluation",
    "Experiment": "bestiary.config.experiment",
    "Policy": "bestiary.training.policy",
    "Run": "bestiary.training.run",
    "UserError": "bestiary.errors",
    "evaluate": "bestiary.training.evaluation",
    "iterate": "bestiary.training.session",
    "load": "bestiary.training.policy",
    "preset": "bestiary.presets",
    "register": "bestiary.config.experiment",
    "train": "bestiary.training.session",
    "video": "bestiary.training.video",  # a module bestiary/video.py would hide this function
}
__all__ = [
    "PRESETS",
    "EvaluationProtocol",
    "Experiment",
    "Policy",
    "Run",
    "UserError",
    "evaluate",
    "iterate",
    "load",
    "preset",
    "register",
    "train",
    "video",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bestiary' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
