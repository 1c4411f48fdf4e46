"""Settings of the runtimes. `runtime.start` builds the runtime that belongs to a setting."""

from dataclasses import dataclass
from typing import Literal

from bestiary.errors import UserError


@dataclass(frozen=True)
class RuntimeBase:
    """Settings that every runtime has."""

    envs: int = 32
    """number of environments that step in parallel (per actor process in runtime:ray)"""
    threads: int | None = None
    """CPU threads of PyTorch and of the emulators; None: one per core for large images, one for small inputs"""
    device: str = "auto"
    """PyTorch device of the networks: cpu, cuda, cuda:1, mps; auto: an accelerator if there is one, else cpu"""

    def __post_init__(self) -> None:
        if self.envs < 1:
            raise UserError(f"runtime.envs={self.envs} must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"runtime.threads={self.threads} must be at least 1")

    @property
    def streams(self) -> int:
        """Number of environment streams that one replay shard stores."""
        return self.envs

    @property
    def shards_and_learners(self) -> tuple[int, int]:
        """Number of replay shards, and number of learners that each sample a batch per update."""
        return 1, 1


@dataclass(frozen=True)
class Local(RuntimeBase):
    """One process that alternates acting and learning: bit-reproducible for a seed and a number of threads."""


@dataclass(frozen=True)
class Overlap(RuntimeBase):
    """One process that acts and learns in parallel threads: policy lag is bounded and logged; not bit-reproducible."""


@dataclass(frozen=True)
class Ray(RuntimeBase):
    """Actor, replay and learner processes on one machine or a cluster (extra: ray); lost processes are replaced."""

    actors: int = 1
    """number of actor processes, each with `envs` environments"""
    min_actors: int | None = None
    """number of actors to wait for at the start; the others join when resources are free; None: all actors"""
    address: str | None = None
    """address of a running Ray cluster, HOST:PORT or auto; None: start a local Ray for this run"""
    shards: int = 1
    """number of replay shards; each stores an equal part of the streams, and its slowest actor sets its pace"""
    replay_placement: Literal["learner", "anywhere"] = "learner"
    """placement of the replay shards: on the learner's node, or on the nodes with the most free memory"""
    inference: Literal["actor", "shared"] = "actor"
    """where actions are computed: in every actor (IMPALA, Ape-X), or by one inference server in batches (SEED RL)"""
    min_batch: int = 1
    """shared inference: smallest batch, in environments"""
    max_batch: int = 1024
    """shared inference: largest batch, in environments"""
    batch_timeout: float = 0.01
    """shared inference: longest wait for a batch of `min_batch`, in seconds"""
    learners: int = 1
    """number of data-parallel learner processes; each samples a batch, and the gradients of all are summed"""
    actor_cpus: float = 1.0
    """CPU cores reserved for each actor"""
    learner_cpus: float = 1.0
    """CPU cores reserved for each learner"""
    gpus: float | None = None
    """GPUs reserved for each learner; None: one if the cluster has one and `device` allows it"""
    lockstep: bool = False
    """act and learn strictly in turn, in a fixed order, as runtime:local does; slow, for tests of equivalence"""
    timeout: float = 120.0
    """seconds without an answer after which a process is considered lost and is replaced"""
    max_restarts: int = 3
    """number of times the run restarts from its last checkpoint after the learner or the driver was lost"""

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
            raise UserError("runtime.lockstep needs runtime.inference=actor and runtime.learners=1")
        if min(self.actor_cpus, self.learner_cpus, self.gpus or 0.0) < 0 or self.batch_timeout < 0:
            raise UserError("runtime.actor-cpus, learner-cpus, gpus and batch-timeout must be at least 0")
        if self.timeout <= 0 or self.max_restarts < 0:
            raise UserError("runtime.timeout must be positive and runtime.max-restarts at least 0")

    @property
    def streams(self) -> int:
        return -(-self.actors // self.shards) * self.envs

    @property
    def shards_and_learners(self) -> tuple[int, int]:
        return self.shards, self.learners


RuntimeConfig = Local | Overlap | Ray
