"""A cluster played through, event by event: actors, links, replay shards, learner, and how each makes others wait."""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import linear_regression
from typing import NamedTuple

from bestiary.bench.scaling.events import Clock, Node, Server, Then
from bestiary.bench.scaling.model import Cluster, Measured, bound
from bestiary.errors import UserError


class Prediction(NamedTuple):
    frames_per_second: float  # learnt from
    utilisation: dict[str, float]  # 0 to 1; of shards and links the busiest, of actors the mean
    bottleneck: str  # the most used
    lag: float  # updates made since the weights that played, mean over the moves of a batch as it is learnt from
    lag_max: int
    produced: float  # moves that replay was given, from the start
    learnt: float
    waiting: float  # moves that replay holds or that are on their way to the learner


class Batcher(Server):
    """Shared inference: waits for enough requests or long enough, then answers all it may at once."""

    def __init__(self, node: Node, m: Measured, c: Cluster) -> None:
        super().__init__(node)
        assert c.inference is not None
        self.m, self.rule, self.requests = m, c.inference, deque[tuple[float, Then]]()

    def ask(self, then: Then) -> None:
        clock = self.node.clock
        self.requests.append((clock.now + self.rule.timeout_seconds, then))
        if len(self.requests) < self.rule.minimum:
            clock.at(clock.now + self.rule.timeout_seconds, self.answer)
        self.answer()

    def answer(self) -> None:
        if self.busy or not self.requests:
            return
        if len(self.requests) < self.rule.minimum and self.node.clock.now < self.requests[0][0]:
            return
        now = [self.requests.popleft()[1] for _ in range(min(self.rule.maximum, len(self.requests)))]

        def answered() -> None:
            for then in now:
                then()
            self.answer()

        self.do(self.m.inference_seconds + self.m.inference_seconds_per_request * len(now), answered)


class Shard(Server):
    """Part of the replay: what it was given, oldest first, and how much of that is still to be learnt from."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.held: deque[tuple[int, float]] = deque()  # (version that played, moves)
        self.due = 0.0  # moves
        self.waiting: list[Then] = []  # actors, until it owes less
        self.room = 0.0  # trajectories that may be begun for those that left

    def take(self, moves: float) -> list[tuple[int, float]]:
        self.due -= moves
        taken = []
        while moves > 1e-9:
            version, there = self.held.popleft()
            taken.append((version, min(there, moves)))
            if there > moves:
                self.held.appendleft((version, there - moves))
            moves -= there
        return taken


class Simulation:
    def __init__(self, m: Measured, c: Cluster, seed: int) -> None:
        self.m, self.c, self.clock, self.rng = m, c, Clock(), random.Random(seed)
        self.home = Node(self.clock, c)  # of the learner
        self.learner = Server(self.home, m.learner_cores)
        alone = c.placement == "apart"
        self.shards = [Shard(Node(self.clock, c) if alone else self.home) for _ in range(c.shards)]
        self.inference = Batcher(self.home, m, c) if c.inference else None
        together = c.placement == "together"
        places = [self.home if together else Node(self.clock, c) for _ in range(c.nodes)]
        self.actors = [Actor(self, places[i // c.actors_per_node], self.shards[i % c.shards]) for i in range(c.actors)]
        self.nodes = list({id(node): node for node in (self.home, *(s.node for s in self.shards), *places)}.values())
        self.full = max(c.queue * m.moves, m.moves_per_update)  # moves due; always enough for a batch
        self.version = self.under_way = self.turn = 0
        self.produced = self.learnt = 0.0
        self.updates: list[tuple[float, list[tuple[int, float]]]] = []  # when, and [(lag, moves)]

    def added(self, shard: Shard, version: int) -> None:
        shard.held.append((version, self.m.moves))
        shard.due += self.m.moves
        self.produced += self.m.moves
        self.ask()

    def ask(self) -> None:
        """Batches that are due set out to the learner, from each shard in turn, as many as may be under way."""
        need = self.m.moves_per_update
        while self.under_way <= self.c.prefetch:
            turns = (self.shards[(self.turn + i) % len(self.shards)] for i in range(len(self.shards)))
            shard = next((s for s in turns if s.due >= need - 1e-6), None)
            if shard is None:
                return
            self.turn = self.shards.index(shard) + 1
            self.under_way += 1
            learn = partial(self.learn, shard.take(need))
            shard.do(self.m.sample_seconds, partial(shard.node.send, self.home, self.m.batch_bytes, learn))
            self.wake(shard, need / self.m.moves)

    def wake(self, shard: Shard, room: float) -> None:
        """Actors that waited begin, once their shard owes little enough."""
        if shard.due > self.full or not shard.waiting:
            shard.room = 0.0
            return
        shard.room += 2 * room  # twice, so that more and more play while the shard can take it
        count = len(shard.waiting) if self.c.wake == "all" else int(shard.room)
        shard.room -= int(shard.room)
        woken, shard.waiting = shard.waiting[:count], shard.waiting[count:]
        for begin in woken:
            begin()

    def learn(self, batch: list[tuple[int, float]]) -> None:
        def done() -> None:
            lags = [(self.version - version, moves) for version, moves in batch]
            self.updates.append((self.clock.now, lags))
            self.version += 1
            self.under_way -= 1
            self.learnt += self.m.moves_per_update
            self.ask()

        self.learner.do(self.m.update_seconds, done)

    def with_weights(self, node: Node, then: Callable[[int], object]) -> None:
        """Play with the newest weights there are; who begins while they are being fetched waits for the same ones."""
        if node is self.home or self.inference is not None:
            then(self.version)
        elif node.fetching is not None:
            node.fetching.append(lambda: then(node.version))
        elif node.version == self.version:
            then(node.version)
        else:
            version, node.fetching = self.version, [lambda: then(node.version)]

            def fetched() -> None:
                waiting, node.fetching, node.version = node.fetching or [], None, version
                for begin in waiting:
                    begin()

            self.home.send(node, self.m.weights_bytes, fetched)

    def spread(self) -> float:
        """Some unrolls are slower than others: a factor of mean 1."""
        variance = self.m.actor_spread**2
        return self.rng.gammavariate(1 / variance, variance) if variance else 1.0

    def used(self) -> dict[str, list[float]]:
        """Seconds of work so far, one entry per unit of a resource."""
        crowded = [n for n in self.nodes if self.may_crowd(n)]
        return {
            "actors": [sum(actor.work for actor in self.actors) / len(self.actors)],
            "learner": [self.learner.work],
            "replay": [shard.work for shard in self.shards],
            "network in": [node.inward.used() for node in self.nodes],
            "network out": [node.outward.used() for node in self.nodes],
            "inference": [self.inference.work if self.inference else 0.0],
            "cores": [node.work / node.cores for node in crowded] or [0.0],
        }

    def may_crowd(self, node: Node) -> bool:
        asked = self.m.actor_cores * sum(actor.node is node for actor in self.actors)
        if node is self.home:
            asked += self.m.learner_cores + (self.inference is not None)
        return asked + sum(shard.node is node for shard in self.shards) > node.cores


class Actor:
    """Fetches weights, plays an unroll, sends it to its shard, and begins again when it may."""

    def __init__(self, simulation: Simulation, node: Node, shard: Shard) -> None:
        self.simulation, self.node, self.shard = simulation, node, shard
        self.flying, self.playing, self.waiting, self.work = 0, False, False, 0.0

    def begin(self) -> None:
        if self.playing or self.waiting or self.flying == self.simulation.c.in_flight:
            return
        if self.shard.due > self.simulation.full:
            self.waiting = True
            self.shard.waiting.append(self.resume)
            return
        self.playing = True
        self.flying += 1
        self.simulation.with_weights(self.node, self.play)

    def resume(self) -> None:
        self.waiting = False
        self.begin()

    def play(self, version: int) -> None:
        m, factor = self.simulation.m, self.simulation.spread()
        if self.simulation.inference is None:
            self.move(m.actor_seconds * factor, partial(self.played, version))
        else:
            self.row(m.environment_seconds * factor / m.unroll, m.unroll, version)

    def row(self, seconds: float, left: int, version: int) -> None:
        """One move with shared inference: the request goes there, the answer comes back, the environments step."""
        simulation, inference = self.simulation, self.simulation.inference
        assert inference is not None
        if left == 0:
            self.played(version)
            return
        step = partial(self.move, seconds, partial(self.row, seconds, left - 1, version))
        back = self.node.latency if self.node is not simulation.home else 0.0
        answered = partial(self.later, back, step)
        self.node.send(simulation.home, simulation.m.request_bytes, partial(inference.ask, answered))

    def later(self, seconds: float, then: Then) -> None:
        self.node.clock.at(self.node.clock.now + seconds, then)

    def move(self, seconds: float, then: Then) -> None:
        def done() -> None:
            self.work += seconds
            then()

        self.node.run(seconds, self.simulation.m.actor_cores, done)

    def played(self, version: int) -> None:
        self.playing = False

        def stored() -> None:
            self.flying -= 1
            self.simulation.added(self.shard, version)
            self.begin()

        add = partial(self.shard.do, self.simulation.m.add_seconds, stored)
        self.node.send(self.shard.node, self.simulation.m.trajectory_bytes, add)
        self.begin()


def long_enough(m: Measured, c: Cluster, rounds: int = 20) -> float:
    """Seconds in which every actor plays about so many unrolls, and all together a few hundred, as fast as can be."""
    unrolls = max(rounds * c.actors, 400)
    return unrolls * m.moves * m.frames_per_move / bound(m, c).frames_per_second


def simulate(m: Measured, c: Cluster, seconds: float | None = None, seed: int = 0) -> Prediction:
    """What the cluster does in the second half of so many seconds."""
    seconds = long_enough(m, c) if seconds is None else seconds
    if not seconds > 0:
        raise UserError(f"seconds={seconds} must be positive")
    simulation = Simulation(m, c, seed)
    for actor in simulation.actors:
        actor.begin()
    simulation.clock.run(seconds / 2)
    before, first = simulation.used(), len(simulation.updates)
    simulation.clock.run(seconds)
    after, made = simulation.used(), simulation.updates[first:]

    half = seconds / 2
    utilisation = {
        name: min(1.0, max((b - a) / half for a, b in zip(before[name], after[name], strict=True))) for name in after
    }
    bottleneck = max(utilisation, key=lambda name: utilisation[name])
    # a straight line through all updates: they come in bursts, and counting would depend on where the half begins
    times = [when for when, _ in made]
    rate = linear_regression(times, range(len(times))).slope if len(times) > 1 else len(times) / half
    lags = [(lag, moves) for _, batch in made for lag, moves in batch]
    return Prediction(
        frames_per_second=rate * m.moves_per_update * m.frames_per_move,
        utilisation=utilisation,
        bottleneck=bottleneck.split()[0],
        lag=sum(lag * moves for lag, moves in lags) / max(1e-9, sum(moves for _, moves in lags)),
        lag_max=max((lag for lag, _ in lags), default=0),
        produced=simulation.produced,
        learnt=simulation.learnt,
        waiting=sum(moves for shard in simulation.shards for _, moves in shard.held)
        + simulation.under_way * m.moves_per_update,
    )
