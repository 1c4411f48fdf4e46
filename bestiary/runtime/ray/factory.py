"""Creation of the worker processes of a run, each on the node that the placement chose for it."""

from typing import Any

from bestiary.runtime import Ray
from bestiary.runtime.ray.cluster import deferred, prefer, remote_class
from bestiary.runtime.ray.placement import Placement
from bestiary.runtime.ray.workers import ActorWorker, EvaluatorWorker, LearnerWorker, ReplayShard, WorkerSpec
from bestiary.types import Snapshot, Spec


class WorkerFactory:
    """Every method starts a process and returns a handle to it. All but the evaluator must be started by `start()`."""

    def __init__(self, cfg: Ray, placement: Placement, worker_spec: WorkerSpec, spec: Spec) -> None:
        self.cfg, self.placement, self.worker_spec, self.spec = cfg, placement, worker_spec, spec

    def learner(self, rank: int) -> Any:
        where = prefer(self.placement.learners[rank])
        cls = remote_class(
            deferred(LearnerWorker), self.cfg.learner_cpus, self.placement.learner_gpus, scheduling_strategy=where
        )
        return cls.remote(self.worker_spec, self.spec, rank)

    def shard(self, number: int) -> Any:
        cls = remote_class(deferred(ReplayShard), scheduling_strategy=prefer(self.placement.shards[number]))
        return cls.remote(self.worker_spec, self.spec, number)

    def inference_server(self) -> Any:
        from bestiary.runtime.ray.inference import InferenceServer

        assert self.placement.inference is not None
        cls = remote_class(
            deferred(InferenceServer),
            self.cfg.actor_cpus,
            self.placement.inference_gpus,
            scheduling_strategy=prefer(self.placement.inference),
            max_concurrency=2 * self.cfg.actors + 4,
        )
        return cls.remote(self.worker_spec, self.spec)

    def evaluator(self) -> Any:
        # the second concurrent call asks for the heartbeat
        where = prefer(self.placement.evaluator)
        return remote_class(EvaluatorWorker, scheduling_strategy=where, max_concurrency=2).remote(
            self.worker_spec, self.spec
        )

    def actor(self, number: int, restarts: int, resumes: int, explorer: Snapshot, inference_server: Any) -> Any:
        """The first actor of a slot goes where the placement says; its replacements go wherever there is room."""
        node = self.placement.actors[number]
        where = prefer(node) if node is not None and restarts == 0 else "SPREAD"
        cls = remote_class(deferred(ActorWorker), self.cfg.actor_cpus, scheduling_strategy=where)
        return cls.remote(self.worker_spec, number, restarts, resumes, explorer, inference_server)
