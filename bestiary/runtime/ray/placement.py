"""Placement: which process runs on which node. It is computed and printed before any process starts."""

from dataclasses import dataclass
from typing import NamedTuple

from bestiary.config.experiment import Experiment
from bestiary.errors import UserError
from bestiary.replay.base import step_bytes
from bestiary.runtime import Ray
from bestiary.runtime.ray.cluster import RayNode
from bestiary.types import Spec

TRAJECTORIES_PER_ACTOR = 3  # trajectories of one actor in shared memory at a time, at most
BATCHES = 4  # batches, and versions of the weights, in shared memory at a time, at most


class MemoryNeeds(NamedTuple):
    """Memory that the parts of an experiment take, in bytes."""

    trajectory: int
    weights: int
    shard: int  # a full replay shard

    def shared(self, actors: int) -> int:
        """Peak use of shared memory (Ray's object store)."""
        return (TRAJECTORIES_PER_ACTOR * actors + BATCHES) * self.trajectory + BATCHES * self.weights


def memory_needs(experiment: Experiment, spec: Spec, weights: int) -> MemoryNeeds:
    """The needs of an experiment whose network has so many bytes of weights."""
    runtime, unroll = experiment.runtime, experiment.algo.unroll
    replay = experiment.algo.replay_builder(runtime.streams).share(*runtime.shards_and_learners)
    step = step_bytes(spec) + 4 * spec.num_actions
    return MemoryNeeds(step * (unroll + 1) * runtime.envs, weights, replay.nbytes(spec, unroll))


class Resources(NamedTuple):
    """Resources that one process reserves."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory: int = 0  # bytes

    def fit_in(self, free: "Resources") -> bool:
        return all(have >= need - 1e-9 for have, need in zip(free, self, strict=True))


class FreeResources:
    """Resources of every node that no process has reserved yet."""

    def __init__(self, nodes: list[RayNode]) -> None:
        self.nodes = nodes
        self.of = {node.id: Resources(node.cpus, node.gpus, node.memory) for node in nodes}

    def reserve(self, need: Resources, among: list[RayNode]) -> RayNode | None:
        """Reserve on the candidate with most resources left; None if no candidate has enough."""
        candidates = [node for node in among if need.fit_in(self.of[node.id])]
        if not candidates:
            return None

        def left(node: RayNode) -> tuple[float, ...]:
            free = self.of[node.id]
            return (free.gpus if need.gpus else 0.0, free.cpus, free.memory)

        best = max(candidates, key=left)
        free = self.of[best.id]
        self.of[best.id] = Resources(free.cpus - need.cpus, free.gpus - need.gpus, free.memory - need.memory)
        return best

    def require(self, what: str, need: Resources, among: list[RayNode]) -> RayNode:
        node = self.reserve(need, among)
        if node is None:
            raise UserError(
                f"the {what} needs {need.cpus:g} cores, {need.gpus:g} GPUs and {need.memory / 2**30:.1f} GiB "
                f"on one node; available: {_inventory(self.nodes)}"
            )
        return node


@dataclass(frozen=True)
class Placement:
    """The node of every process, and the GPUs it reserves."""

    nodes: list[RayNode]
    runtime: Ray
    needs: MemoryNeeds
    learners: list[RayNode]
    shards: list[RayNode]
    inference: RayNode | None  # the inference server's node; None: every actor runs its own policy
    evaluator: RayNode
    actors: list[RayNode | None]  # None: the actor waits for a node to join
    learner_gpus: float  # of each learner
    inference_gpus: float

    @property
    def lines(self) -> tuple[str, ...]:
        """The placement as text, one line per node."""
        found = [self._line(node) for node in self.nodes]
        if late := self.actors.count(None):
            found.append(f"{_count(late, 'actor')} will join when there is room")
        need, have = self.needs.shared(self.runtime.actors), sum(node.store for node in self.nodes)
        found.append(f"shared memory: up to {need / 2**20:,.0f} MiB of {have / 2**20:,.0f}")
        return tuple(found)

    def _line(self, node: RayNode) -> str:
        cfg, here = self.runtime, []
        if count := self.learners.count(node):
            here.append(f"{_count(count, 'learner')} ({cfg.learner_cpus:g} cores, {self.learner_gpus:g} GPUs each)")
        if count := self.shards.count(node):
            here.append(f"{_count(count, 'replay shard')} (up to {self.needs.shard / 2**20:,.0f} MiB each)")
        if node == self.inference:
            here.append(f"inference server ({cfg.actor_cpus:g} cores, {self.inference_gpus:g} GPUs)")
        if node == self.evaluator:
            here.append("evaluator")
        if count := self.actors.count(node):
            here.append(f"{_count(count, 'actor')} ({cfg.actor_cpus:g} cores, {cfg.envs} environments each)")
        return f"{node.name}: {', '.join(here) or 'nothing'}; of {node.cpus:g} cores"


def plan(nodes: list[RayNode], runtime: Ray, needs: MemoryNeeds) -> Placement:
    """Place learners on GPUs or else on most cores, shards beside them or where memory is, actors on all nodes.

    A UserError says what would fit if the cluster is too small.
    """
    if not nodes:
        raise UserError("the cluster has no node that is alive")
    free = FreeResources(nodes)
    use_gpus = runtime.device == "auto" or runtime.device.startswith("cuda")
    gpus = _learner_gpus(runtime, sum(node.gpus for node in nodes) if use_gpus else 0.0)
    learner = Resources(runtime.learner_cpus, gpus)
    learners = [free.require("learner", learner, nodes) for _ in range(runtime.learners)]
    candidates = [learners[0]] if runtime.replay_placement == "learner" else nodes
    shard = Resources(memory=needs.shard)
    shards = [free.require("replay shard", shard, candidates) for _ in range(runtime.shards)]
    inference, inference_gpus = None, 0.0
    if runtime.inference == "shared":
        inference_gpus = min(1.0, max(left.gpus for left in free.of.values())) if use_gpus else 0.0
        inference = free.require("inference server", Resources(runtime.actor_cpus, inference_gpus), nodes)
    actors = [free.reserve(Resources(runtime.actor_cpus), nodes) for _ in range(runtime.actors)]
    _check_actors(runtime, nodes, placed=sum(node is not None for node in actors))
    _check_shared_memory(needs.shared(runtime.actors), sum(node.store for node in nodes))
    evaluator = max(nodes, key=lambda node: (node.id != learners[0].id, free.of[node.id].cpus))
    return Placement(
        nodes, runtime, needs, learners, shards, inference, evaluator, actors, gpus, inference_gpus
    )  # fmt: skip


def _learner_gpus(runtime: Ray, available: float) -> float:
    """GPUs of each learner. With fewer than one per process the learner and the inference server share one."""
    if runtime.gpus is not None:
        return runtime.gpus
    if available < 1:
        return 0.0
    return 0.5 if runtime.inference == "shared" and available < runtime.learners + 1 else 1.0


def _check_actors(runtime: Ray, nodes: list[RayNode], placed: int) -> None:
    if placed >= (runtime.min_actors or runtime.actors):
        return
    cores = sum(node.cpus for node in nodes)
    server = runtime.actor_cpus if runtime.inference == "shared" else 0.0
    each = max(cores - runtime.learners * runtime.learner_cpus - server, 0) / runtime.actors
    raise UserError(
        f"{runtime.actors} actors with {runtime.actor_cpus:g} cores each and {_count(runtime.learners, 'learner')} "
        f"with {runtime.learner_cpus:g} cores do not fit on {cores:g} cores ({_inventory(nodes)}): "
        + (f"lower --runtime.actors to {placed}, " if placed else "")
        + (f"--runtime.actor-cpus to {int(each * 1000) / 1000:g}, " if each >= 0.001 else "")
        + "or let actors join later with --runtime.min-actors"
    )


def _check_shared_memory(need: int, have: int) -> None:
    if need > have:
        raise UserError(
            f"up to {need / 2**30:.1f} GiB of trajectories and weights may be in shared memory, but the cluster has "
            f"{have / 2**30:.1f} GiB: lower --runtime.actors or --runtime.envs, "
            "or start nodes with a larger --object-store-memory"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _inventory(nodes: list[RayNode]) -> str:
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return (
        "; ".join(f"{n.name}: {n.cpus:g} cores, {n.gpus:g} GPUs, {n.memory / 2**30:.1f} GiB" for n in nodes[:8]) + more
    )
