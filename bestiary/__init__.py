"""Reinforcement learning with memory: every algorithm, every memory, every environment."""

import os
from typing import TYPE_CHECKING, Any

from bestiary.config.registration import register_with_gymnasium

# Read once, when PyTorch's OpenMP library is loaded: idle threads should spin only briefly, because the
# emulators' threads want the same cores (acting alone became a quarter faster on two cores).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

register_with_gymnasium()

if TYPE_CHECKING:
    from bestiary.config.experiment import Experiment, register
    from bestiary.presets import preset
    from bestiary.training.evaluation import evaluate
    from bestiary.training.run import Run
    from bestiary.training.session import iterate, train
    from bestiary.training.video import video

_HOME = {  # imported when first used, so that `import bestiary` is quick
    "Experiment": "bestiary.config.experiment",
    "Run": "bestiary.training.run",
    "evaluate": "bestiary.training.evaluation",
    "iterate": "bestiary.training.session",
    "preset": "bestiary.presets",
    "register": "bestiary.config.experiment",
    "train": "bestiary.training.session",
    "video": "bestiary.training.video",  # a module of that name would hide it
}
__all__ = ["Experiment", "Run", "evaluate", "iterate", "preset", "register", "train", "video"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bestiary' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
