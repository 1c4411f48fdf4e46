"""Analytic model of a cluster's throughput: an upper bound from the capacity of each resource.

`bestiary.bench.scaling.simulator` simulates the same cluster event by event.
"""

import json
import math
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bestiary.config.schema import fits
from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError


def check(numbers: Any, may_be_zero: tuple[str, ...]) -> None:
    """Raise a UserError if a number of a dataclass is negative, or 0 where it must not be."""
    for field in fields(numbers):
        value = getattr(numbers, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        zero = field.name in may_be_zero
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise UserError(f"{field.name}={value} must be {'at least 0' if zero else 'positive'}")


@dataclass(frozen=True)
class Measured:
    """Times and sizes of each part, measured on one machine while nothing else ran."""

    envs: int
    """E: environments of an actor"""
    unroll: int
    """T: steps of each environment in a trajectory"""
    frames_per_step: int
    """environment frames per agent step (frame skip; Atari 4)"""
    actor_seconds: float
    """seconds of one unroll: T steps of E environments, inference included"""
    trajectory_bytes: float
    """size of a trajectory of one actor, in bytes"""
    weights_bytes: float
    """size of the network's weights, in bytes"""
    add_seconds: float
    """seconds in which a replay shard stores one trajectory"""
    sample_seconds: float
    """seconds in which a replay shard samples one batch and updates its priorities"""
    update_seconds: float
    """seconds of one learner update"""
    batch_transitions: int
    """transitions in a batch"""
    cores: int
    """CPU cores of the machine on which everything was measured"""
    updates_per_step: float | None = None
    """gradient updates per agent step; None: every transition is used once"""
    actor_cores: float = 1
    """CPU cores that an unroll keeps busy"""
    learner_cores: float = 1
    """CPU cores that an update keeps busy"""
    actor_variation: float = 0.05
    """coefficient of variation of `actor_seconds`: standard deviation divided by mean"""
    environment_seconds: float = 0
    """seconds of one unroll without inference; needed for shared inference"""
    inference_seconds: float = 0
    """seconds of one call of shared inference, whatever the batch size"""
    inference_seconds_per_request: float = 0
    """additional seconds per request in the batch; a request is one step of the E environments of an actor"""

    def __post_init__(self) -> None:
        inference = ("environment_seconds", "inference_seconds", "inference_seconds_per_request")
        check(self, ("weights_bytes", "add_seconds", "sample_seconds", "actor_variation", *inference))

    @property
    def transitions(self) -> int:
        """Transitions in a trajectory of one actor."""
        return self.envs * self.unroll

    @property
    def steps_per_update(self) -> float:
        return self.batch_transitions if self.updates_per_step is None else 1 / self.updates_per_step

    @property
    def batch_bytes(self) -> float:
        return self.trajectory_bytes * self.batch_transitions / self.transitions

    @property
    def request_bytes(self) -> float:
        """Size of a request to shared inference: one time step of a trajectory."""
        return self.trajectory_bytes / self.unroll


@dataclass(frozen=True)
class SharedInference:
    """Dynamic batching in one inference server: a batch waits for `min_requests`, but no longer than the timeout."""

    min_requests: int = 1
    """smallest batch, in requests"""
    max_requests: int = 64
    """largest batch, in requests"""
    timeout_seconds: float = 0.01
    """longest wait for a batch of `min_requests`, in seconds"""

    def __post_init__(self) -> None:
        check(self, ("timeout_seconds",))
        if self.min_requests > self.max_requests:
            raise UserError(f"min_requests={self.min_requests} must be at most max_requests={self.max_requests}")


@dataclass(frozen=True)
class Cluster:
    """A cluster, and the node of each process. The learner and the inference server share a node."""

    actors: int
    """number of actors"""
    actors_per_node: int = 8
    """number of actors on each of their nodes"""
    shards: int = 1
    """number of replay shards, to which actors are assigned in turn"""
    placement: Literal["single-node", "learner", "own-nodes"] = "learner"
    """single-node: everything on one node; learner: the replay on the learner's node; own-nodes: a node per shard"""
    link_bytes_per_second: float = 1.25e9
    """bandwidth of each node's link in each direction, in bytes/s"""
    link_latency_seconds: float = 1e-4
    """latency of a message, in seconds"""
    cores: int = 8
    """CPU cores of each node"""
    inference: SharedInference | None = None
    """shared inference; None: every actor computes its own actions"""
    in_flight: int = 1
    """largest number of unrolls of an actor that have started and are not stored yet"""
    queue: int = 16
    """trajectories for which updates may be due in a shard; while there are more, its actors pause"""
    wake: Literal["all", "some"] = "all"
    """paused actors that continue once fewer updates are due; some: two for each trajectory that leaves the shard"""
    prefetch: int = 2
    """batches on their way to the learner, besides the one of the current update"""

    def __post_init__(self) -> None:
        check(self, ("link_latency_seconds", "prefetch"))

    @property
    def actor_nodes(self) -> int:
        """Number of nodes with actors."""
        return math.ceil(self.actors / self.actors_per_node)

    def transfer_seconds(self, size: float) -> float:
        return size / self.link_bytes_per_second + self.link_latency_seconds


class Bound(NamedTuple):
    """The highest throughput that a cluster can reach."""

    frames_per_second: float
    bottleneck: str  # the resource with the lowest capacity
    capacity: dict[str, float]  # frames per second that each resource alone would allow


def bound(m: Measured, c: Cluster) -> Bound:
    """The lowest capacity of any resource. A resource's capacity in steps per second is 1 / (its seconds per step)."""
    remote, shared = c.placement != "single-node", c.inference is not None
    shards, updates = min(c.shards, c.actors), 1 / m.steps_per_update  # shards with actors; updates per step
    # The first actor of a node that starts an unroll fetches new weights, if there are any, for all others there.
    fetched = min(1.0, updates * m.transitions * c.actors) if remote and not shared else 0.0
    fetches = fetched / min(c.actors, c.actors_per_node)  # per unroll
    acting = m.environment_seconds if shared else m.actor_seconds

    requesting = serving = 0.0  # an actor's seconds per request; the server's seconds per request of a full batch
    if c.inference is not None:
        largest = min(c.inference.max_requests, c.actors)
        serving = m.inference_seconds / largest + m.inference_seconds_per_request
        requesting = m.inference_seconds + m.inference_seconds_per_request
        requesting += c.inference.timeout_seconds if c.actors < c.inference.min_requests else 0.0
        requesting += c.transfer_seconds(m.request_bytes) + c.link_latency_seconds if remote else 0.0

    unroll = acting + m.unroll * requesting + (fetches * c.transfer_seconds(m.weights_bytes) if remote else 0.0)
    in_flight = unroll + m.add_seconds + (c.transfer_seconds(m.trajectory_bytes) if remote else 0.0)
    own_nodes = c.placement == "own-nodes"
    batch = m.sample_seconds + m.update_seconds + (c.transfer_seconds(m.batch_bytes) if own_nodes else 0.0)

    # bytes per step through the busiest links, and core-seconds per step of the learner's node
    trajectories, batches = m.trajectory_bytes / m.transitions, m.batch_bytes * updates
    requests = trajectories if shared else 0.0  # every time step is sent to the inference server once
    # out of the learner's node, and out of the actors' nodes
    ends = (fetches * m.weights_bytes / m.transitions, (trajectories + requests) / c.actor_nodes)
    links = {
        "single-node": (0.0,),
        "learner": (*ends, trajectories + requests),
        "own-nodes": (*ends, batches + requests, max(trajectories, batches) / shards),
    }[c.placement]
    replaying = m.add_seconds / m.transitions + m.sample_seconds * updates
    learner_node = m.update_seconds * m.learner_cores * updates + serving / m.envs
    learner_node += 0.0 if own_nodes else replaying
    actor_nodes = acting * m.actor_cores / m.transitions
    node = max(learner_node, actor_nodes / c.actor_nodes) if remote else learner_node + actor_nodes

    seconds = {
        "actors": max(unroll, in_flight / c.in_flight) / m.transitions / c.actors,
        "learner": max(m.update_seconds, batch / (c.prefetch + 1)) * updates,
        "replay": replaying / shards,
        "network": max(links) / c.link_bytes_per_second,
        "inference": serving / m.envs,
        "cores": node / c.cores,
    }
    capacity = {name: m.frames_per_step / value if value else math.inf for name, value in seconds.items()}
    bottleneck = min(capacity, key=lambda name: capacity[name])
    return Bound(capacity[bottleneck], bottleneck, capacity)


class Throughput(NamedTuple):
    """Measured throughput of one machine with a number of actors."""

    actors: int
    frames_per_second: float


def read(path: Path) -> tuple[Measured, list[Throughput]]:
    """Read what `bestiary bench cluster --json` writes: {"measured": {...}, "points": [{...}, ...]}."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: `bestiary bench cluster --json {path}` writes it") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("measured"), dict):
        raise UserError(f'{path} has no measurements: it should hold an object with the keys "measured" and "points"')
    points = data.get("points", [])
    if not isinstance(points, list) or not all(map(is_throughput, points)):
        raise UserError(f"points of {path} should be a list of objects with positive actors and frames_per_second")
    return measured(data["measured"], str(path)), [Throughput(p["actors"], p["frames_per_second"]) for p in points]


def measured(data: dict[str, Any], where: str = "measured") -> Measured:
    """The inverse of `dataclasses.asdict`."""
    hints = typing.get_type_hints(Measured)
    for name, value in data.items():
        if name not in hints:
            raise UserError(f"{where} has an unknown measurement {name!r}: {did_you_mean(name, hints)}")
        if not fits(hints[name], value):
            raise UserError(f"{name} of {where} cannot be {value!r}")
    if missing := [name for name in hints if name not in data and not hasattr(Measured, name)]:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    return Measured(**data)


def is_throughput(point: Any) -> bool:
    numbers = [point.get(name, 0) for name in Throughput._fields] if isinstance(point, dict) else []
    return [fits(kind, x) and 0 < x < math.inf for kind, x in zip((int, float), numbers, strict=False)] == [True, True]
