"""Builds the runtime that an experiment's settings ask for."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bestiary.config.experiment import Experiment
from bestiary.config.extras import require
from bestiary.config.schema import kebab
from bestiary.errors import UserError
from bestiary.runtime.config import Local, Overlap, Ray
from bestiary.runtime.evaluation import AsyncEvaluation
from bestiary.types import Episode, Progress, Snapshot


class Runtime(Protocol):
    """The interface between training sessions and runtimes. Iterating trains and yields Progress after each unroll."""

    device: torch.device
    threads: int
    frames: int  # environment frames so far (agent steps times frame skip)

    @property
    def updates(self) -> int:
        """Number of learner updates so far."""
        ...

    @property
    def replay_bytes(self) -> int:
        """Size of the stored experience in bytes."""
        ...

    @property
    def startup_messages(self) -> Sequence[str]:
        """Information for the user, shown once before training starts."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Warnings since the last Progress."""
        ...

    @property
    def evaluates_remotely(self) -> bool:
        """Whether evaluations run in other processes, so that training need not wait for them."""
        ...

    def __iter__(self) -> Iterator[Progress]: ...
    def init_from(self, weights: dict[str, Tensor], learner_state: Snapshot) -> None: ...
    def evaluate(self, weights: dict[str, Tensor], stop: Callable[[], bool]) -> list[Episode]: ...
    def evaluate_async(self, weights: dict[str, Tensor]) -> AsyncEvaluation: ...
    def weights(self) -> dict[str, Tensor]: ...
    def state_dict(self, at_rest: bool = True, with_replay: bool = True) -> Snapshot: ...
    def load_state_dict(self, weights: dict[str, Tensor], state: Snapshot) -> None: ...
    def close(self) -> None: ...


def start(experiment: Experiment) -> Any:
    """Build the `Runtime` of an experiment. Settings from a plugin build theirs in a method `start(experiment)`."""
    cfg = experiment.runtime
    if type(cfg) is Local:
        from bestiary.runtime.local import LocalRuntime

        return LocalRuntime(experiment)
    if type(cfg) is Overlap:
        from bestiary.runtime.overlap import OverlapRuntime

        return OverlapRuntime(experiment)
    if type(cfg) is Ray:
        require("ray", "ray")
        from bestiary.runtime.ray.driver import RayRuntime

        return RayRuntime(experiment)
    own = getattr(cfg, "start", None)
    if own is None:
        raise UserError(f"runtime:{kebab(type(cfg))} cannot start: its class needs a method start(experiment)")
    return own(experiment)
