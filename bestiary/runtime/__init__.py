"""Where an experiment runs. Here are the settings; the machinery is imported when a run starts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bestiary.errors import UserError

if TYPE_CHECKING:
    from bestiary.experiment import Experiment
    from bestiary.runtime.local import LocalRuntime


@dataclass(frozen=True)
class _Machine:
    envs: int = 32
    """environments played at once"""
    threads: int | None = None
    """CPU threads; None: one per core for large pictures, a single one for small inputs"""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto: an accelerator if there is one"""

    def __post_init__(self) -> None:
        if self.envs < 1:
            raise UserError(f"runtime.envs={self.envs} must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"runtime.threads={self.threads} must be at least 1")


@dataclass(frozen=True)
class Local(_Machine):
    """One process, one thing after the other: bit-reproducible for a seed and a number of threads."""

    def start(self, experiment: "Experiment") -> "LocalRuntime":
        from bestiary.runtime.local import LocalRuntime

        return LocalRuntime(experiment)


@dataclass(frozen=True)
class Overlap(_Machine):
    """One process, acting and learning at the same time: policy lag is bounded and logged, bits may differ."""

    def start(self, experiment: "Experiment") -> "LocalRuntime":
        from bestiary.runtime.overlap import OverlapRuntime

        return OverlapRuntime(experiment)


RuntimeConfig = Local | Overlap
