"""Discrete-event simulation of a cluster: actors, network links, replay shards, learner, and their back-pressure."""

import random
from collections import deque
from statistics import linear_regression
from typing import Any, NamedTuple

import simpy

from bestiary.bench.scaling.events import Node, Server, Steps
from bestiary.bench.scaling.model import Cluster, Measured, SharedInference, bound
from bestiary.errors import UserError


class Prediction(NamedTuple):
    """Simulated throughput and policy lag."""

    frames_per_second: float  # of which the learner has used the transitions
    utilisation: dict[str, float]  # 0 to 1; the busiest shard, link and node; the mean of the actors
    bottleneck: str  # the resource with the highest utilisation
    lag: float  # policy lag: updates since the weights that acted, mean over the transitions of all batches
    lag_max: int
    collected: float  # transitions added to the replay, from the start
    learned: float  # transitions for which updates were made
    waiting: float  # transitions in the replay or on their way to the learner


class DynamicBatcher(Server):
    """The server of shared inference: a batch waits for enough requests, but no longer than the timeout."""

    def __init__(self, node: Node, m: Measured, c: SharedInference) -> None:
        super().__init__(node)
        self.m, self.c, self.busy = m, c, False
        self.requests = deque[tuple[float, simpy.Event]]()  # (deadline, answered)

    def request(self) -> simpy.Event:
        """Queue a request; returns the event of its answer."""
        env = self.node.env
        answered = env.event()
        self.requests.append((env.now + self.c.timeout_seconds, answered))
        if len(self.requests) < self.c.min_requests:
            env.timeout(self.c.timeout_seconds).callbacks.append(lambda _: self.serve())
        self.serve()
        return answered

    def serve(self) -> None:
        """Compute a batch if the server is free and a batch is ready."""
        enough = len(self.requests) >= self.c.min_requests
        if not self.busy and self.requests and (enough or self.node.env.now >= self.requests[0][0]):
            self.busy = True
            self.node.env.process(self.compute())

    def compute(self) -> Steps:
        batch = [self.requests.popleft()[1] for _ in range(min(self.c.max_requests, len(self.requests)))]
        yield from self.do(self.m.inference_seconds + self.m.inference_seconds_per_request * len(batch))
        for answered in batch:
            answered.succeed()
        self.busy = False
        self.serve()


class SimulatedShard(Server):
    """A replay shard: a FIFO queue of transitions, and the number of transitions for which updates are due."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.stored: deque[tuple[int, float]] = deque()  # (version of the weights that acted, transitions)
        self.due = 0.0  # transitions
        self.paused: list[simpy.Event] = []  # actors that wait until fewer updates are due
        self.credit = 0.0  # unrolls that paused actors may start because trajectories have left

    def take(self, count: float) -> list[tuple[int, float]]:
        """Remove the oldest transitions."""
        self.due -= count
        taken = []
        while count > 1e-9:
            version, available = self.stored.popleft()
            taken.append((version, min(available, count)))
            if available > count:
                self.stored.appendleft((version, available - count))
            count -= available
        return taken


class Simulation:
    """All processes of a cluster, and the rules by which they start and wait."""

    def __init__(self, m: Measured, c: Cluster, seed: int) -> None:
        self.m, self.c, self.env, self.rng = m, c, simpy.Environment(), random.Random(seed)
        self.learner_node = Node(self.env, c)
        self.learner = Server(self.learner_node, m.learner_cores)
        own_nodes, single_node = c.placement == "own-nodes", c.placement == "single-node"
        self.shards = [SimulatedShard(Node(self.env, c) if own_nodes else self.learner_node) for _ in range(c.shards)]
        self.inference = DynamicBatcher(self.learner_node, m, c.inference) if c.inference else None
        hosts = [self.learner_node if single_node else Node(self.env, c) for _ in range(c.actor_nodes)]
        self.actors = [
            SimulatedActor(self, hosts[i // c.actors_per_node], self.shards[i % c.shards]) for i in range(c.actors)
        ]
        nodes = (self.learner_node, *(shard.node for shard in self.shards), *hosts)
        self.nodes = list({id(node): node for node in nodes}.values())
        self.full = max(c.queue * m.transitions, m.steps_per_update)  # transitions due; always enough for a batch
        self.version = self.batches_under_way = self.next_shard = 0
        self.collected = self.learned = 0.0
        self.updates: list[tuple[float, list[tuple[int, float]]]] = []  # (time, [(lag, transitions)])

    def added(self, shard: SimulatedShard, version: int) -> None:
        """A shard has stored a trajectory."""
        shard.stored.append((version, self.m.transitions))
        shard.due += self.m.transitions
        self.collected += self.m.transitions
        self.request_batches()

    def request_batches(self) -> None:
        """Send batches that are due to the learner, from the shards in turn, up to `prefetch` ahead."""
        need = self.m.steps_per_update
        while self.batches_under_way <= self.c.prefetch:
            turns = (self.shards[(self.next_shard + i) % len(self.shards)] for i in range(len(self.shards)))
            shard = next((s for s in turns if s.due >= need - 1e-6), None)
            if shard is None:
                return
            self.next_shard = self.shards.index(shard) + 1
            self.batches_under_way += 1
            self.env.process(self.learn(shard, shard.take(need)))
            self.wake(shard, need / self.m.transitions)

    def wake(self, shard: SimulatedShard, trajectories: float) -> None:
        """Let paused actors continue if few enough updates are due; `trajectories` have left the shard."""
        if shard.due > self.full or not shard.paused:
            shard.credit = 0.0
            return
        shard.credit += 2 * trajectories  # two for each, so that more and more actors collect until the shard is full
        count = len(shard.paused) if self.c.wake == "all" else int(shard.credit)
        shard.credit -= int(shard.credit)
        woken, shard.paused = shard.paused[:count], shard.paused[count:]
        for resume in woken:
            resume.succeed()

    def learn(self, shard: SimulatedShard, batch: list[tuple[int, float]]) -> Steps:
        """Sample a batch, send it to the learner, and make an update."""
        yield from shard.do(self.m.sample_seconds)
        yield from shard.node.send(self.learner_node, self.m.batch_bytes)
        yield from self.learner.do(self.m.update_seconds)
        lags = [(self.version - version, transitions) for version, transitions in batch]
        self.updates.append((self.env.now, lags))
        self.version += 1
        self.batches_under_way -= 1
        self.learned += self.m.steps_per_update
        self.request_batches()

    def weights(self, node: Node) -> Steps:
        """Returns the version of the newest weights. Actors of a node share one fetch of each version."""
        if node is self.learner_node or self.inference is not None:
            return self.version
        if node.fetching is None and node.version != self.version:
            node.fetching = self.env.process(self.fetch(node))
        if node.fetching is not None:
            yield node.fetching
        return node.version

    def fetch(self, node: Node) -> Steps:
        version = self.version
        yield from self.learner_node.send(node, self.m.weights_bytes)
        node.version, node.fetching = version, None

    def duration_factor(self) -> float:
        """A random factor with mean 1 of an unroll's duration (gamma distribution)."""
        variance = self.m.actor_variation**2
        return self.rng.gammavariate(1 / variance, variance) if variance else 1.0

    def busy_seconds(self) -> dict[str, list[float]]:
        """Seconds of work so far, one entry per unit of a resource."""
        overloaded = [n for n in self.nodes if self.may_overload(n)]
        return {
            "actors": [sum(actor.work for actor in self.actors) / len(self.actors)],
            "learner": [self.learner.work],
            "replay": [shard.work for shard in self.shards],
            "network in": [node.inward.busy_seconds() for node in self.nodes],
            "network out": [node.outward.busy_seconds() for node in self.nodes],
            "inference": [self.inference.work if self.inference else 0.0],
            "cores": [node.work / node.cores for node in overloaded] or [0.0],
        }

    def may_overload(self, node: Node) -> bool:
        """Whether the processes of a node can request more cores than it has."""
        requested = self.m.actor_cores * sum(actor.node is node for actor in self.actors)
        if node is self.learner_node:
            requested += self.m.learner_cores + (self.inference is not None)
        return requested + sum(shard.node is node for shard in self.shards) > node.cores


class SimulatedActor:
    """Repeats: fetch weights, collect an unroll, send it to the shard. It pauses while the shard is full."""

    def __init__(self, simulation: Simulation, node: Node, shard: SimulatedShard) -> None:
        self.simulation, self.node, self.shard, self.work = simulation, node, shard, 0.0
        self.in_flight = simpy.Resource(simulation.env, simulation.c.in_flight)

    def run(self) -> Steps:
        env = self.simulation.env
        while True:
            slot = self.in_flight.request()
            yield slot
            while self.shard.due > self.simulation.full:
                resume = env.event()
                self.shard.paused.append(resume)
                yield resume
            version = yield from self.simulation.weights(self.node)
            yield from self.unroll()
            env.process(self.store(version, slot))

    def unroll(self) -> Steps:
        m, inference, server = self.simulation.m, self.simulation.inference, self.simulation.learner_node
        factor = self.simulation.duration_factor()
        if inference is None:
            yield from self.act(m.actor_seconds * factor)
            return
        for _ in range(m.unroll):  # send a request, receive actions, step the environments
            yield from self.node.send(server, m.request_bytes)
            yield inference.request()
            yield self.node.env.timeout(self.node.latency if self.node is not server else 0.0)
            yield from self.act(m.environment_seconds * factor / m.unroll)

    def act(self, seconds: float) -> Steps:
        yield self.node.run(seconds, self.simulation.m.actor_cores)
        self.work += seconds

    def store(self, version: int, slot: Any) -> Steps:
        """Send the trajectory to the shard."""
        yield from self.node.send(self.shard.node, self.simulation.m.trajectory_bytes)
        yield from self.shard.do(self.simulation.m.add_seconds)
        self.in_flight.release(slot)
        self.simulation.added(self.shard, version)


def long_enough(m: Measured, c: Cluster, rounds: int = 20) -> float:
    """Seconds in which every actor completes about `rounds` unrolls, and all actors a few hundred, at the bound."""
    unrolls = max(rounds * c.actors, 400)
    return unrolls * m.transitions * m.frames_per_step / bound(m, c).frames_per_second


def simulate(m: Measured, c: Cluster, seconds: float | None = None, seed: int = 0) -> Prediction:
    """Simulate so many seconds (None: `long_enough`), and measure during the second half."""
    seconds = long_enough(m, c) if seconds is None else seconds
    if not seconds > 0:
        raise UserError(f"seconds={seconds} must be positive")
    simulation = Simulation(m, c, seed)
    for actor in simulation.actors:
        simulation.env.process(actor.run())
    simulation.env.run(seconds / 2)
    before, first = simulation.busy_seconds(), len(simulation.updates)
    simulation.env.run(seconds)
    after, updates = simulation.busy_seconds(), simulation.updates[first:]

    half = seconds / 2
    utilisation = {
        name: min(1.0, max((b - a) / half for a, b in zip(before[name], after[name], strict=True))) for name in after
    }
    bottleneck = max(utilisation, key=lambda name: utilisation[name])
    # linear regression over all updates: they come in bursts, so a count would depend on where the half begins
    times = [time for time, _ in updates]
    rate = linear_regression(times, range(len(times))).slope if len(times) > 1 else len(times) / half
    lags = [(lag, transitions) for _, batch in updates for lag, transitions in batch]
    return Prediction(
        frames_per_second=rate * m.steps_per_update * m.frames_per_step,
        utilisation=utilisation,
        bottleneck=bottleneck.split()[0],
        lag=sum(lag * count for lag, count in lags) / max(1e-9, sum(count for _, count in lags)),
        lag_max=max((lag for lag, _ in lags), default=0),
        collected=simulation.collected,
        learned=simulation.learned,
        waiting=sum(count for shard in simulation.shards for _, count in shard.stored)
        + simulation.batches_under_way * m.steps_per_update,
    )
