"""Discrete-event simulation: a clock, nodes with cores and network links, and servers that process jobs in turn."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

from bestiary.bench.scaling.model import Cluster

Callback = Callable[[], object]


class Clock:
    """Simulated time in seconds, which advances from event to event."""

    def __init__(self) -> None:
        self.now, self.events, self.order = 0.0, list[tuple[float, int, Callback]](), itertools.count()

    def at(self, when: float, callback: Callback) -> None:
        """Schedule a callback; callbacks of the same time run in the order in which they were scheduled."""
        heapq.heappush(self.events, (when, next(self.order), callback))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, callback = heapq.heappop(self.events)
            callback()
        self.now = until


class Link:
    """One direction of a node's network link, which transmits messages in the order of their arrival."""

    def __init__(self, clock: Clock, bytes_per_second: float) -> None:
        self.clock, self.bandwidth, self.free_at, self.work = clock, bytes_per_second, 0.0, 0.0

    def transmit(self, size: float) -> float:
        """Queue a message; returns when its transmission starts. It ends at `free_at`."""
        start = max(self.clock.now, self.free_at)
        self.free_at = start + size / self.bandwidth
        self.work += size / self.bandwidth
        return start

    def busy_seconds(self) -> float:
        """Time spent transmitting so far."""
        return self.work - max(0.0, self.free_at - self.clock.now)


class Node:
    """A machine with processor sharing: if jobs request more cores than it has, all of them slow down alike."""

    def __init__(self, clock: Clock, c: Cluster) -> None:
        self.clock, self.cores, self.latency = clock, c.cores, c.link_latency_seconds
        self.inward, self.outward = (Link(clock, c.link_bytes_per_second) for _ in range(2))
        self.jobs: list[tuple[float, int, float, Callback]] = []  # (progress at its end, order, cores, callback)
        self.order = itertools.count()
        self.progress = 0.0  # seconds of work that every job on this node would have done since the start
        self.advanced_at = self.requested = self.work = 0.0  # cores requested; core-seconds of work
        self.plans = 0
        self.version = -1  # of the weights on this node
        self.fetching: list[Callback] | None = None  # callbacks that wait for weights under way

    def run(self, seconds: float, cores: float, callback: Callback) -> None:
        """Start a job that takes so many seconds if the node is not overloaded."""
        self.advance()
        heapq.heappush(self.jobs, (self.progress + seconds, next(self.order), cores, callback))
        self.requested += cores
        self.work += seconds * cores
        self.plan()

    @property
    def speed(self) -> float:
        return min(1.0, self.cores / self.requested) if self.jobs else 1.0

    def advance(self) -> None:
        self.progress += (self.clock.now - self.advanced_at) * self.speed
        self.advanced_at = self.clock.now

    def plan(self) -> None:
        """Schedule the end of the next job; earlier plans become void."""
        self.plans += 1
        if self.jobs:
            wait = max(0.0, self.jobs[0][0] - self.progress) / self.speed
            self.clock.at(self.clock.now + wait, partial(self.finish, self.plans))

    def finish(self, plan: int) -> None:
        if plan != self.plans:
            return
        self.advance()
        _, _, cores, callback = heapq.heappop(self.jobs)
        self.requested -= cores
        self.plan()
        callback()

    def send(self, target: "Node", size: float, callback: Callback) -> None:
        """Send a message. It waits for this node's link, then for the target's, and passes both at the same time."""
        if target is self:
            callback()
            return

        def arrive() -> None:
            target.inward.transmit(size)
            self.clock.at(target.inward.free_at, callback)

        self.clock.at(self.outward.transmit(size) + self.latency, arrive)


class Server:
    """A process that works on one job at a time, in the order of their arrival."""

    def __init__(self, node: Node, cores: float = 1) -> None:
        self.node, self.cores, self.busy, self.work = node, cores, False, 0.0
        self.waiting_jobs: deque[tuple[float, Callback]] = deque()

    def do(self, seconds: float, callback: Callback) -> None:
        """Queue a job."""
        self.waiting_jobs.append((seconds, callback))
        self.start_next()

    def start_next(self) -> None:
        if self.busy or not self.waiting_jobs:
            return
        self.busy = True
        seconds, callback = self.waiting_jobs.popleft()

        def done() -> None:
            self.busy = False
            self.work += seconds
            callback()
            self.start_next()

        self.node.run(seconds, self.cores, done)
