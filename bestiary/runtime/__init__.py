"""Where an experiment runs. Here are the settings; the machinery is imported when a run starts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bestiary.config.extras import require
from bestiary.errors import UserError

if TYPE_CHECKING:
    from bestiary.config.experiment import Experiment
    from bestiary.runtime.local import LocalRuntime
    from bestiary.runtime.ray.driver import ClusterRuntime


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

    @property
    def streams(self) -> int:
        """Environments whose rows one replay takes."""
        return self.envs

    @property
    def parts(self) -> tuple[int, int]:
        """Replays that share the experience, and learners that each take a batch for an update."""
        return 1, 1


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


@dataclass(frozen=True)
class Ray(_Machine):
    """Processes on one machine or many (extra: ray): actors come and go, nothing that was learnt is lost."""

    actors: int = 1
    """processes that play, each in `envs` environments of its own"""
    min_actors: int | None = None
    """start with so many, the others join as soon as there is room for them; None: all"""
    address: str | None = None
    """of a running cluster, HOST:PORT or auto; None: one of our own on this machine, which ends with the run"""
    shards: int = 1
    """replays, each with its part of the actors and of the experience; within a shard the slowest sets the pace"""
    replay_at: Literal["learner", "anywhere"] = "learner"
    """where shards live: beside the learner, or wherever there is most room"""
    inference: Literal["actor", "shared"] = "actor"
    """who chooses actions: every actor for itself, or one process for all, in batches"""
    min_batch: int = 1
    """of shared inference: environments to wait for ..."""
    max_batch: int = 1024
    """... at most so many at a time ..."""
    batch_timeout: float = 0.01
    """... and no longer than so many seconds"""
    learners: int = 1
    """processes that learn; each takes a batch, and together they take one step"""
    actor_cpus: float = 1.0
    """cores reserved for each actor"""
    learner_cpus: float = 1.0
    """cores reserved for each learner"""
    gpus: float | None = None
    """GPUs reserved for each learner; None: one if there is one and `device` may use it"""
    lockstep: bool = False
    """one thing after the other, as in runtime:local: slow, but in a fixed order"""
    patience: float = 120.0
    """seconds without an answer after which a process is given up and replaced"""
    max_restarts: int = 3
    """how often to go on from the last checkpoint after the learner, or the whole command, was lost"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("actors", "shards", "learners", "min_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"runtime.{name.replace('_', '-')}={getattr(self, name)} must be at least 1")
        if self.min_actors is not None and not 1 <= self.min_actors <= self.actors:
            raise UserError(f"runtime.min-actors={self.min_actors} must lie between 1 and runtime.actors={self.actors}")
        if self.shards > self.actors:
            raise UserError(f"runtime.shards={self.shards} must be at most runtime.actors={self.actors}")
        if self.max_batch < self.min_batch:
            raise UserError(f"runtime.max-batch={self.max_batch} must be at least runtime.min-batch={self.min_batch}")
        if self.lockstep and (self.inference == "shared" or self.learners > 1):
            raise UserError("runtime.lockstep is for one learner and actors that choose for themselves")
        if min(self.actor_cpus, self.learner_cpus, self.gpus or 0.0) < 0 or self.batch_timeout < 0:
            raise UserError("runtime.actor-cpus, learner-cpus, gpus and batch-timeout must be at least 0")
        if self.patience <= 0 or self.max_restarts < 0:
            raise UserError("runtime.patience must be positive and runtime.max-restarts at least 0")

    @property
    def streams(self) -> int:
        return -(-self.actors // self.shards) * self.envs

    @property
    def parts(self) -> tuple[int, int]:
        return self.shards, self.learners

    def start(self, experiment: "Experiment") -> "ClusterRuntime":
        require("ray", "ray")
        from bestiary.runtime.ray.driver import ClusterRuntime

        return ClusterRuntime(experiment)


RuntimeConfig = Local | Overlap | Ray
