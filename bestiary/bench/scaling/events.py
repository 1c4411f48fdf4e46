"""Time that jumps from event to event: machines with cores and links, and processes that do one thing after another."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial

from bestiary.bench.scaling.model import Cluster

Then = Callable[[], object]  # what happens next


class Clock:
    def __init__(self) -> None:
        self.now, self.events, self.order = 0.0, list[tuple[float, int, Then]](), itertools.count()

    def at(self, when: float, then: Then) -> None:
        heapq.heappush(self.events, (when, next(self.order), then))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, then = heapq.heappop(self.events)
            then()
        self.now = until


class Link:
    """One direction of a machine's network: messages pass in the order in which they come."""

    def __init__(self, clock: Clock, bytes_per_second: float) -> None:
        self.clock, self.speed, self.free, self.work = clock, bytes_per_second, 0.0, 0.0

    def take(self, size: float) -> float:
        """When this message begins to pass; it has passed at `free`."""
        start = max(self.clock.now, self.free)
        self.free = start + size / self.speed
        self.work += size / self.speed
        return start

    def used(self) -> float:
        return self.work - max(0.0, self.free - self.clock.now)


class Node:
    """A machine. When more cores are asked for than it has, all that runs there is slowed alike."""

    def __init__(self, clock: Clock, c: Cluster) -> None:
        self.clock, self.cores, self.latency = clock, c.cores, c.link_latency_seconds
        self.inward, self.outward = (Link(clock, c.link_bytes_per_second) for _ in range(2))
        self.jobs: list[tuple[float, int, float, Then]] = []  # (progress at which it is done, order, cores, then)
        self.order = itertools.count()
        self.progress = self.seen = self.asked = self.work = 0.0  # progress: seconds that a job here has advanced
        self.wakes = 0
        self.version = -1  # of the weights here
        self.fetching: list[Then] | None = None

    def run(self, seconds: float, cores: float, then: Then) -> None:
        self.advance()
        heapq.heappush(self.jobs, (self.progress + seconds, next(self.order), cores, then))
        self.asked += cores
        self.work += seconds * cores
        self.plan()

    @property
    def speed(self) -> float:
        return min(1.0, self.cores / self.asked) if self.jobs else 1.0

    def advance(self) -> None:
        self.progress += (self.clock.now - self.seen) * self.speed
        self.seen = self.clock.now

    def plan(self) -> None:
        """The next job to end; whatever was planned before is void."""
        self.wakes += 1
        if self.jobs:
            wait = max(0.0, self.jobs[0][0] - self.progress) / self.speed
            self.clock.at(self.clock.now + wait, partial(self.wake, self.wakes))

    def wake(self, planned: int) -> None:
        if planned != self.wakes:
            return
        self.advance()
        _, _, cores, then = heapq.heappop(self.jobs)
        self.asked -= cores
        self.plan()
        then()

    def send(self, target: "Node", size: float, then: Then) -> None:
        """A message flows through both links at once, after waiting for the first and then for the second."""
        if target is self:
            then()
            return

        def arrive() -> None:
            target.inward.take(size)
            self.clock.at(target.inward.free, then)

        self.clock.at(self.outward.take(size) + self.latency, arrive)


class Server:
    """A process that does one thing after another."""

    def __init__(self, node: Node, cores: float = 1) -> None:
        self.node, self.cores, self.busy, self.work = node, cores, False, 0.0
        self.todo: deque[tuple[float, Then]] = deque()

    def do(self, seconds: float, then: Then) -> None:
        self.todo.append((seconds, then))
        self.begin()

    def begin(self) -> None:
        if self.busy or not self.todo:
            return
        self.busy = True
        seconds, then = self.todo.popleft()

        def done() -> None:
            self.busy = False
            self.work += seconds
            then()
            self.begin()

        self.node.run(seconds, self.cores, done)
