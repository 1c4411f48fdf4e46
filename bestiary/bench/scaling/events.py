"""Parts of a simulated cluster, on SimPy's discrete-event clock: nodes with cores and network links, and servers."""

import heapq
import itertools
from collections.abc import Generator
from typing import Any

import simpy

from bestiary.bench.scaling.model import Cluster

Steps = Generator[Any, Any, Any]  # a generator that yields SimPy events, to be run by `yield from` or as a process


class Link:
    """One direction of a node's network link, which transmits messages in the order of their arrival."""

    def __init__(self, env: simpy.Environment, bytes_per_second: float) -> None:
        self.env, self.bandwidth, self.free_at, self.work = env, bytes_per_second, 0.0, 0.0

    def transmit(self, size: float) -> float:
        """Queue a message; returns when its transmission starts. It ends at `free_at`."""
        start = max(self.env.now, self.free_at)
        self.free_at = start + size / self.bandwidth
        self.work += size / self.bandwidth
        return start

    def busy_seconds(self) -> float:
        """Time spent transmitting so far."""
        return self.work - max(0.0, self.free_at - self.env.now)


class Node:
    """A machine with processor sharing: if jobs request more cores than it has, all of them slow down alike."""

    def __init__(self, env: simpy.Environment, c: Cluster) -> None:
        self.env, self.cores, self.latency = env, c.cores, c.link_latency_seconds
        self.inward, self.outward = (Link(env, c.link_bytes_per_second) for _ in range(2))
        self.jobs: list[tuple[float, int, float, simpy.Event]] = []  # (progress at its end, order, cores, done)
        self.order = itertools.count()
        self.progress = 0.0  # seconds of work that every job on this node would have done since the start
        self.advanced_at = self.requested = self.work = 0.0  # cores requested; core-seconds of work
        self.plans = 0
        self.version = -1  # of the weights on this node
        self.fetching: simpy.Process | None = None  # of newer weights

    def run(self, seconds: float, cores: float) -> simpy.Event:
        """Start a job that takes so many seconds if the node is not overloaded; returns the event of its end."""
        self.advance()
        done = self.env.event()
        heapq.heappush(self.jobs, (self.progress + seconds, next(self.order), cores, done))
        self.requested += cores
        self.work += seconds * cores
        self.plan()
        return done

    @property
    def speed(self) -> float:
        return min(1.0, self.cores / self.requested) if self.jobs else 1.0

    def advance(self) -> None:
        self.progress += (self.env.now - self.advanced_at) * self.speed
        self.advanced_at = self.env.now

    def plan(self) -> None:
        """Schedule the end of the next job; earlier plans become void."""
        self.plans += 1
        if self.jobs:
            wait = max(0.0, self.jobs[0][0] - self.progress) / self.speed
            self.env.timeout(wait, self.plans).callbacks.append(self.finish)

    def finish(self, timeout: simpy.Event) -> None:
        if timeout.value == self.plans:
            self.advance()
            _, _, cores, done = heapq.heappop(self.jobs)
            self.requested -= cores
            self.plan()
            done.succeed()

    def send(self, target: "Node", size: float) -> Steps:
        """Send a message. It waits for this node's link, then for the target's, and passes both at the same time."""
        if target is not self:
            yield self.env.timeout(self.outward.transmit(size) + self.latency - self.env.now)
            target.inward.transmit(size)
            yield self.env.timeout(target.inward.free_at - self.env.now)


class Server:
    """A process that works on one job at a time, in the order of their arrival."""

    def __init__(self, node: Node, cores: float = 1) -> None:
        self.node, self.cores, self.work = node, cores, 0.0
        self.turns = simpy.Resource(node.env)

    def do(self, seconds: float) -> Steps:
        with self.turns.request() as turn:
            yield turn
            yield self.node.run(seconds, self.cores)
            self.work += seconds
