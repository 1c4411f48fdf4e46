"""Who runs where: planned before anything starts, told, and refused if it cannot be."""

from typing import NamedTuple

from bestiary.errors import UserError
from bestiary.runtime import Ray
from bestiary.runtime.ray.cluster import Node

FLYING = 3  # trajectories of an actor that may be under way at a time
OTHERS = 4  # batches, and versions of the weights, that may be


class Needs(NamedTuple):
    """What the parts of an experiment take, in bytes."""

    trajectory: int
    weights: int
    shard: int  # of a replay shard when it is full

    def store(self, actors: int) -> int:
        """Shared memory that may be needed at a time."""
        return (FLYING * actors + OTHERS) * self.trajectory + OTHERS * self.weights


class Plan(NamedTuple):
    learners: list[Node]
    shards: list[Node]
    judge: Node
    chooser: Node | None  # who infers for all
    actors: list[Node | None]  # None: waits for a node to join
    gpus: float  # for each learner
    chooser_gpus: float
    store: int  # bytes of shared memory that all this may need at a time
    lines: tuple[str, ...]  # for people


def plan(nodes: list[Node], runtime: Ray, needs: Needs) -> Plan:
    """The learner where GPUs or else most cores are, the replay beside it or where memory is, actors all over."""
    if not nodes:
        raise UserError("the cluster has no node that is alive")
    free = {node.id: [node.cpus, node.gpus, node.memory] for node in nodes}
    wanted = runtime.device in ("auto",) or runtime.device.startswith("cuda")
    shared = runtime.inference == "shared"
    there = sum(node.gpus for node in nodes) if wanted else 0.0
    gpus = runtime.gpus
    if gpus is None:  # with fewer than one each, whoever chooses and the learner share
        gpus = 0.0 if there < 1 else 0.5 if shared and there < runtime.learners + 1 else 1.0

    def take(what: str, cpus: float, gpu: float, memory: int, among: list[Node]) -> Node | None:
        """Of the nodes that have it, the one with most left."""
        able = [n for n in among if all(h >= w - 1e-9 for h, w in zip(free[n.id], (cpus, gpu, memory), strict=True))]
        if not able:
            return None
        best = max(able, key=lambda n: (free[n.id][1] if gpu else 0, *free[n.id][::2]))
        free[best.id] = [h - w for h, w in zip(free[best.id], (cpus, gpu, memory), strict=True)]
        return best

    def must(what: str, cpus: float, gpu: float, memory: int, among: list[Node]) -> Node:
        found = take(what, cpus, gpu, memory, among)
        if found is None:
            raise UserError(
                f"the {what} needs {cpus:g} cores, {gpu:g} GPUs and {memory / 2**30:.1f} GiB on one node; "
                f"what there is: {_has(nodes)}"
            )
        return found

    learners = [must("learner", runtime.learner_cpus, gpus, 0, nodes) for _ in range(runtime.learners)]
    beside = [learners[0]] if runtime.replay_at == "learner" else nodes
    shards = [must("replay shard", 0, 0, needs.shard, beside) for _ in range(runtime.shards)]
    chooser, chooser_gpus = None, 0.0
    if shared:
        most = max(free[node.id][1] for node in nodes) if wanted else 0.0
        chooser_gpus = min(1.0, most)
        chooser = must("shared inference", runtime.actor_cpus, chooser_gpus, 0, nodes)
    actors = [take("actor", runtime.actor_cpus, 0, 0, nodes) for _ in range(runtime.actors)]
    placed = sum(node is not None for node in actors)
    if placed < (runtime.min_actors or runtime.actors):
        cores = sum(node.cpus for node in nodes)
        rest = cores - runtime.learners * runtime.learner_cpus - (runtime.actor_cpus if chooser else 0)
        less = max(rest, 0) / runtime.actors
        raise UserError(
            f"{runtime.actors} actors with {runtime.actor_cpus:g} cores each, beside {runtime.learners} learner with "
            f"{runtime.learner_cpus:g}, do not fit on {cores:g} cores ({_has(nodes)}): "
            + (f"lower --runtime.actors to {placed}, " if placed else "")
            + (f"--runtime.actor-cpus to {int(less * 1000) / 1000:g}, " if less >= 0.001 else "")
            + "or let them join later with --runtime.min-actors"
        )
    store = needs.store(runtime.actors)
    have = sum(node.store for node in nodes)
    if store > have:
        raise UserError(
            f"up to {store / 2**30:.1f} GiB of trajectories and weights may be under way, but the cluster has "
            f"{have / 2**30:.1f} GiB of shared memory: lower --runtime.actors or --runtime.envs, "
            "or start nodes with a larger --object-store-memory"
        )
    judge = max(nodes, key=lambda n: (n.id != learners[0].id, free[n.id][0]))
    lines = _lines(nodes, runtime, needs, learners, shards, chooser, judge, actors, (gpus, chooser_gpus), store)
    return Plan(learners, shards, judge, chooser, actors, gpus, chooser_gpus, store, lines)


def _has(nodes: list[Node]) -> str:
    return "; ".join(f"{n.name}: {n.cpus:g} cores, {n.gpus:g} GPUs, {n.memory / 2**30:.1f} GiB" for n in nodes[:8]) + (
        f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    )


def _lines(
    nodes: list[Node],
    runtime: Ray,
    needs: Needs,
    learners: list[Node],
    shards: list[Node],
    chooser: Node | None,
    judge: Node,
    actors: list[Node | None],
    gpus: tuple[float, float],
    store: int,
) -> tuple[str, ...]:
    found = []
    for node in nodes:
        here = []
        if count := learners.count(node):
            here.append(f"{count} learner{'s' * (count > 1)} ({runtime.learner_cpus:g} cores, {gpus[0]:g} GPUs each)")
        if count := shards.count(node):
            here.append(f"{count} replay shard{'s' * (count > 1)} (up to {needs.shard / 2**20:,.0f} MiB each)")
        if node == chooser:
            here.append(f"inference for all ({runtime.actor_cpus:g} cores, {gpus[1]:g} GPUs)")
        if node == judge:
            here.append("evaluation")
        if count := actors.count(node):
            here.append(
                f"{count} actor{'s' * (count > 1)} ({runtime.actor_cpus:g} cores, {runtime.envs} environments each)"
            )
        found.append(f"{node.name}: {', '.join(here) or 'nothing'}; of {node.cpus:g} cores")
    if late := actors.count(None):
        found.append(f"{late} actor{'s' * (late > 1)} will join when there is room")
    found.append(f"shared memory: up to {store / 2**20:,.0f} MiB of {sum(n.store for n in nodes) / 2**20:,.0f}")
    return tuple(found)
