"""What a cluster should yield, on paper: no part of it can do more than its own speed allows.

`bestiary.bench.scaling.simulator` plays the same cluster through, event by event.
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


def check(figures: Any, may_be_zero: tuple[str, ...]) -> None:
    """Every number is positive, but for those that may be nothing at all."""
    for field in fields(figures):
        value = getattr(figures, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        zero = field.name in may_be_zero
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise UserError(f"{field.name}={value} must be {'at least 0' if zero else 'positive'}")


@dataclass(frozen=True)
class Measured:
    """What one machine can tell of every part, each timed while nothing else ran."""

    envs: int
    """E: environments of an actor"""
    unroll: int
    """T: moves in each of them that make a trajectory"""
    frames_per_move: int
    actor_seconds: float
    """of one unroll: T moves in E environments, their inference included"""
    trajectory_bytes: float
    weights_bytes: float
    add_seconds: float
    """of a replay shard, for one trajectory"""
    sample_seconds: float
    """of a replay shard, for one batch and the priorities that come back for it"""
    update_seconds: float
    """of the learner, for one batch"""
    batch_moves: int
    """moves of a batch"""
    cores: int
    """of the machine where all of this was measured"""
    updates_per_move: float | None = None
    """None: every move is learnt from once"""
    actor_cores: float = 1
    """that an unroll keeps busy"""
    learner_cores: float = 1
    """that an update keeps busy"""
    actor_spread: float = 0.05
    """standard deviation of an unroll's seconds, divided by their mean"""
    environment_seconds: float = 0
    """of one unroll, without inference; needed where that is shared"""
    inference_seconds: float = 0
    """of one call of shared inference, whatever its size"""
    inference_seconds_per_request: float = 0
    """more, for every request: one move in the E environments of an actor"""

    def __post_init__(self) -> None:
        inference = ("environment_seconds", "inference_seconds", "inference_seconds_per_request")
        check(self, ("weights_bytes", "add_seconds", "sample_seconds", "actor_spread", *inference))

    @property
    def moves(self) -> int:
        """in a trajectory"""
        return self.envs * self.unroll

    @property
    def moves_per_update(self) -> float:
        return self.batch_moves if self.updates_per_move is None else 1 / self.updates_per_move

    @property
    def batch_bytes(self) -> float:
        return self.trajectory_bytes * self.batch_moves / self.moves

    @property
    def request_bytes(self) -> float:
        """What an actor shows to shared inference: one row of its trajectory."""
        return self.trajectory_bytes / self.unroll


@dataclass(frozen=True)
class SharedInference:
    """One process chooses the moves of all actors: whatever waits, once that is enough or has waited long enough."""

    minimum: int = 1
    """requests"""
    maximum: int = 64
    timeout_seconds: float = 0.01

    def __post_init__(self) -> None:
        check(self, ("timeout_seconds",))
        if self.minimum > self.maximum:
            raise UserError(f"minimum={self.minimum} must be at most maximum={self.maximum}")


@dataclass(frozen=True)
class Cluster:
    """Machines, and who is where. The learner has one, with shared inference if there is such."""

    actors: int
    actors_per_node: int = 8
    shards: int = 1
    """of the replay; the actors are dealt to them in turn"""
    placement: Literal["together", "beside", "apart"] = "beside"
    """together: all on one machine; beside: the replay is the learner's neighbour; apart: every shard has a machine"""
    link_bytes_per_second: float = 1.25e9
    """of each machine, each way"""
    link_latency_seconds: float = 1e-4
    cores: int = 8
    """of each machine"""
    inference: SharedInference | None = None
    """None: every actor has its own"""
    in_flight: int = 1
    """unrolls of an actor that were begun and that its shard does not have yet"""
    queue: int = 16
    """trajectories' worth of updates due; while a shard owes more, its actors begin nothing"""
    wake: Literal["all", "some"] = "all"
    """which actors begin when their shard owes less again; some: two for each trajectory that leaves it"""
    prefetch: int = 2
    """batches on their way to the learner besides the one it learns from"""

    def __post_init__(self) -> None:
        check(self, ("link_latency_seconds", "prefetch"))

    @property
    def nodes(self) -> int:
        """machines of actors"""
        return math.ceil(self.actors / self.actors_per_node)

    def transfer_seconds(self, size: float) -> float:
        return size / self.link_bytes_per_second + self.link_latency_seconds


class Bound(NamedTuple):
    frames_per_second: float
    bottleneck: str
    capacity: dict[str, float]  # frames per second that each resource alone would allow


def bound(m: Measured, c: Cluster) -> Bound:
    """The least of what every resource can do: moves per second = 1 / (its seconds per move)."""
    remote, shared = c.placement != "together", c.inference is not None
    shards, updates = min(c.shards, c.actors), 1 / m.moves_per_update  # those with actors; updates per move
    # One actor of a machine fetches new weights for all that begin with it, if there are any since it began last.
    fetched = min(1.0, updates * m.moves * c.actors) if remote and not shared else 0.0
    fetches = fetched / min(c.actors, c.actors_per_node)  # per unroll
    playing = m.environment_seconds if shared else m.actor_seconds

    asking = batched = 0.0  # seconds of an actor for a request, and of the server for each of a full batch
    if c.inference is not None:
        most = min(c.inference.maximum, c.actors)
        batched = m.inference_seconds / most + m.inference_seconds_per_request
        asking = m.inference_seconds + m.inference_seconds_per_request
        asking += c.inference.timeout_seconds if c.actors < c.inference.minimum else 0.0
        asking += c.transfer_seconds(m.request_bytes) + c.link_latency_seconds if remote else 0.0

    unroll = playing + m.unroll * asking + (fetches * c.transfer_seconds(m.weights_bytes) if remote else 0.0)
    in_flight = unroll + m.add_seconds + (c.transfer_seconds(m.trajectory_bytes) if remote else 0.0)
    batch = m.sample_seconds + m.update_seconds + (c.transfer_seconds(m.batch_bytes) if c.placement == "apart" else 0.0)

    # bytes per move through the busiest links, and core-seconds per move of the learner's machine
    trajectories, batches = m.trajectory_bytes / m.moves, m.batch_bytes * updates
    requests = trajectories if shared else 0.0  # every row goes there once
    ends = (fetches * m.weights_bytes / m.moves, (trajectories + requests) / c.nodes)  # from the learner, from actors
    links = {
        "together": (0.0,),
        "beside": (*ends, trajectories + requests),
        "apart": (*ends, batches + requests, max(trajectories, batches) / shards),
    }[c.placement]
    replaying = m.add_seconds / m.moves + m.sample_seconds * updates
    learner_node = m.update_seconds * m.learner_cores * updates + batched / m.envs
    learner_node += replaying if c.placement != "apart" else 0.0
    actor_nodes = playing * m.actor_cores / m.moves
    node = max(learner_node, actor_nodes / c.nodes) if remote else learner_node + actor_nodes

    seconds = {
        "actors": max(unroll, in_flight / c.in_flight) / m.moves / c.actors,
        "learner": max(m.update_seconds, batch / (c.prefetch + 1)) * updates,
        "replay": replaying / shards,
        "network": max(links) / c.link_bytes_per_second,
        "inference": batched / m.envs,
        "cores": node / c.cores,
    }
    capacity = {name: m.frames_per_move / value if value else math.inf for name, value in seconds.items()}
    bottleneck = min(capacity, key=lambda name: capacity[name])
    return Bound(capacity[bottleneck], bottleneck, capacity)


class Point(NamedTuple):
    """What one machine did."""

    actors: int
    frames_per_second: float


def read(path: Path) -> tuple[Measured, list[Point]]:
    """Figures as `bestiary bench cluster --json` writes them: {"measured": {...}, "points": [{...}, ...]}."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: `bestiary bench cluster --json {path}` makes it") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("measured"), dict):
        raise UserError(f'{path} has no figures: it should hold an object with the keys "measured" and "points"')
    points = data.get("points", [])
    if not isinstance(points, list) or not all(map(is_point, points)):
        raise UserError(f"points of {path} should be a list of objects with positive actors and frames_per_second")
    return measured(data["measured"], str(path)), [Point(p["actors"], p["frames_per_second"]) for p in points]


def measured(data: dict[str, Any], where: str = "measured") -> Measured:
    """The inverse of `dataclasses.asdict`."""
    hints = typing.get_type_hints(Measured)
    for name, value in data.items():
        if name not in hints:
            raise UserError(f"{where} has an unknown figure {name!r}: {did_you_mean(name, hints)}")
        if not fits(hints[name], value):
            raise UserError(f"{name} of {where} cannot be {value!r}")
    if missing := [name for name in hints if name not in data and not hasattr(Measured, name)]:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    return Measured(**data)


def is_point(point: Any) -> bool:
    numbers = [point.get(name, 0) for name in Point._fields] if isinstance(point, dict) else []
    return [fits(kind, x) and 0 < x < math.inf for kind, x in zip((int, float), numbers, strict=False)] == [True, True]
