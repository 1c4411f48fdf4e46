"""The processes of a cluster: players, shards of the replay, a teacher and a judge. Ray is around them, not in them."""

import time
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError
from torch import Tensor

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, keep_memory, set_threads
from bestiary.config.plugins import load_file, load_plugins
from bestiary.ops.collective import SINGLE_PROCESS
from bestiary.runtime import Ray
from bestiary.runtime.collective import join, meeting
from bestiary.runtime.evaluation import prepare
from bestiary.runtime.local import Means, build_learner, init_from, learn, write_back
from bestiary.runtime.ray.aligner import Lanes
from bestiary.runtime.ray.wire import Flat, pack, unpack
from bestiary.seeding import ACTIONS, TRAIN, derive, substream
from bestiary.types import Batch, Episode, Snapshot, Spec, Trajectory, Update

FlatWeights = NDArray[np.uint8]


class Order(NamedTuple):
    """What every process is told when it starts. JSON, so that nothing but settings can be in it."""

    experiment: str
    plugins: tuple[str, ...]  # files with parts of one's own

    def read(self) -> Experiment:
        load_plugins()
        for file in self.plugins:
            load_file(file)
        keep_memory()
        return Experiment.from_json(self.experiment)


def settings(experiment: Experiment) -> Ray:
    assert isinstance(experiment.runtime, Ray)
    return experiment.runtime


class Played(NamedTuple):
    """What is told of a trajectory; the trajectory itself goes another way."""

    moves: int
    episodes: list[Episode]
    tally: dict[str, float]
    seconds: float


class Player:
    """An actor in a process of its own."""

    def __init__(
        self, order: Order, number: int, life: int, resumes: int, explorer: Snapshot, chooser: Any = None
    ) -> None:
        """`life`: how many played in its place before; `chooser`: who chooses actions, if not the player itself."""
        experiment = order.read()
        runtime, algo, seed = settings(experiment), experiment.algo, experiment.seed
        first = number == life == 0  # who is alone plays the games of the local runtime
        usual = TRAIN if resumes == 0 else derive(TRAIN, resumes)
        stream = usual if first else substream(TRAIN, number, life, resumes)
        rng = derive(seed, ACTIONS, resumes) if first else derive(seed, ACTIONS, resumes, number, life)
        threads = max(1, round(runtime.actor_cpus))
        self.number = number
        self.env_batch = experiment.env.make(runtime.envs, seed, stream, threads)
        torch.get_num_threads()
        torch.set_num_threads(threads)
        agent = algo.agent(self.env_batch.spec, experiment.net, experiment.core)
        self.flat = Flat(agent.state_dict())
        self.explorer = algo.explorer(runtime.actors * runtime.envs).part(number * runtime.envs, runtime.envs)
        self.explorer.load_state_dict(explorer)
        cpu = torch.device("cpu")
        self.chooser = chooser
        if chooser is None:
            self.actor = Actor(self.env_batch, agent, self.explorer, algo.unroll, rng, cpu)
        else:
            from bestiary.runtime.ray.inference import Asking

            asking = Asking(self.env_batch, agent, self.explorer, algo.unroll, rng, cpu)
            self.actor = asking.ask(chooser, (number, life))
        self.actor.version = -1  # has no weights yet

    def play(self, version: int, weights: FlatWeights) -> tuple[Played, Trajectory]:
        started = time.perf_counter()
        if self.chooser is None and version != self.actor.version:
            self.actor.load(self.flat.unpack(weights), version)
        trajectory, episodes = self.actor.unroll()
        rows, streams = trajectory.action.shape
        packed = pack(trajectory)
        told = Played((rows - 1) * streams, episodes, self.env_batch.tally(), time.perf_counter() - started)
        return told, packed

    def explored(self) -> Snapshot:
        return self.explorer.state_dict()


class Added(NamedTuple):
    full: bool  # producers should wait for the learner
    ahead: list[int]  # lanes that should wait for others


class Shard:
    """A replay in a process of its own, for some of the players."""

    def __init__(self, order: Order, spec: Spec, number: int) -> None:
        experiment = order.read()
        runtime = settings(experiment)
        memory = experiment.algo.agent(spec, experiment.net, experiment.core).initial_state(1)
        seed = experiment.seed if number == 0 else derive(experiment.seed, number)
        config = experiment.algo.replay_builder(runtime.streams).share(*runtime.shards_and_learners)
        self.replay = config.build(seed, spec, memory)
        self.envs = runtime.envs
        self.lanes = Lanes(runtime.streams // runtime.envs)

    def join(self, lane: int) -> None:
        self.lanes.join(lane)

    def leave(self, lane: int) -> Added:
        self.lanes.leave(lane)
        self._pass_on()  # nobody waits for it any more
        return self._added()

    def add(self, lane: int, packed: Trajectory) -> Added:
        if not self.replay.aligned:
            self.replay.add(unpack(packed), lane * self.envs)
        elif self.lanes.present[lane]:  # else it comes from somebody who is gone
            self.lanes.add(lane, unpack(packed))
            self._pass_on()
        return self._added()

    def _added(self) -> Added:
        return Added(self.replay.full, self.lanes.ahead())

    def _pass_on(self) -> None:
        while (t := self.lanes.take()) is not None:
            self.replay.add(t)

    def sample(self) -> "Drawn":
        batch = self.replay.sample()
        packed = None if batch is None else pack(batch)
        return Drawn(packed, Held(self.replay.full, self.replay.bytes, self.replay.metrics()))

    def write_back(self, keys: NDArray[Any], update: Update) -> None:
        write_back(self.replay, unpack(keys), unpack(update))

    def state(self) -> Snapshot:
        return self.replay.state_dict()

    def load(self, state: Snapshot) -> None:
        self.replay.load_state_dict(state)


class Held(NamedTuple):
    """What a shard says of itself."""

    full: bool  # producers should wait for the learner
    bytes: int
    metrics: dict[str, float]


class Drawn(NamedTuple):
    batch: Batch | None  # None: nothing is due
    held: Held


class Taught(NamedTuple):
    """What came of some time of learning."""

    updates: int  # ever made
    changed: bool  # whether some were made now
    metrics: dict[str, float]
    held: dict[int, Held]  # by the shards that were asked
    lost: list[int]  # shards that no longer answer
    idle: float  # share of the time in which there was nothing to learn from
    more: bool  # whether there may be more to learn right now, but for want of time


class Teacher:
    """A learner in a process of its own. It fetches batches from the shards itself, one ahead.

    There may be several: each takes a batch, and they step as one, once each of them has one.
    """

    def __init__(self, order: Order, spec: Spec, rank: int = 0) -> None:
        self.experiment = order.read()
        self.cfg = settings(self.experiment)
        self.device = choose_device(self.cfg.device)
        set_threads(self.cfg.threads, spec)
        self.learner = build_learner(self.experiment, spec, self.device)
        self.flat = Flat(self.learner.agent.state_dict())
        self.ahead = 0 if self.cfg.lockstep else 1
        self.rank = rank
        self.collective = SINGLE_PROCESS
        self.kept: tuple[int, Batch] | None = None  # a batch for which the others had none
        self.shards: dict[int, Any] = {}
        self.next = 0  # of them, which to ask
        self.asked: list[tuple[int, Any]] = []  # batches on their way: shard, reference

    def use(self, shards: dict[int, Any]) -> None:
        """By their numbers."""
        self.shards, self.asked, self.kept = shards, [], None
        self.next = self.rank % len(shards)

    def invite(self) -> str:
        """Where the other learners can meet this one."""
        return meeting(ray.util.get_node_ip_address())

    def meet(self, at: str) -> None:
        """From now on all go on from where the first one is, and step together."""
        self.collective = join(self.rank, self.cfg.learners, at, self.device, self.cfg.timeout)
        self.collective.broadcast_state(self.learner)

    def learn(self, seconds: float) -> tuple[Taught, FlatWeights | None]:
        """Until nothing is due any more or so much time has passed; weights, if they have changed."""
        before, started = self.learner.updates, time.perf_counter()
        means, held, lost = Means(), {}, []
        # seconds of learning; answers in a row that there is nothing, some of which may be from before this lesson
        busy, empty, nothing = 0.0, 0, len(self.shards) + len(self.asked)
        while True:
            over = time.perf_counter() - started >= seconds or bool(lost) or empty >= nothing
            shard, batch = self.kept or ((0, None) if over else self._fetch(held, lost))
            self.kept = None
            if batch is None and not over:
                empty += 1
                continue
            if not self._all_have_one(batch, over):
                self.kept = None if batch is None else (shard, batch)
                break
            assert batch is not None
            empty, nothing, began = 0, len(self.shards), time.perf_counter()
            update = learn(self.learner, unpack(batch), self.experiment.seed, self.device)
            if update.metrics:
                means.add(update.metrics)
            if batch.keys is not None:
                self._write_back(shard, batch.keys, update)
            busy += time.perf_counter() - began
        passed = time.perf_counter() - started
        changed, idle = self.learner.updates > before, 1 - busy / max(passed, 1e-9)
        more = passed >= seconds and empty < nothing and not lost
        taught = Taught(self.learner.updates, changed, means.take(), held, lost, idle, more)
        return taught, self.weights() if changed else None

    def _all_have_one(self, batch: Batch | None, over: bool) -> bool:
        if batch is not None and "survey" in batch.about:
            return True  # what is only judged is judged alone
        ready = batch is not None and not over
        return self.collective.all_reduce_sum(torch.tensor(float(ready))).item() == self.collective.size

    def _fetch(self, held: dict[int, Held], lost: list[int]) -> tuple[int, Batch | None]:
        """The next batch, while others are already being drawn."""
        while len(self.asked) <= self.ahead:
            shard = list(self.shards)[self.next]
            self.asked.append((shard, self.shards[shard].sample.remote()))
            self.next = (self.next + 1) % len(self.shards)
        shard, ref = self.asked.pop(0)
        try:
            batch, held[shard] = ray.get(ref, timeout=self.cfg.timeout)
        except (RayActorError, GetTimeoutError, ObjectLostError):
            lost.append(shard)
            return shard, None
        return shard, batch

    def _write_back(self, shard: int, keys: Any, update: Update) -> None:
        if update.priorities is None and update.value_targets is None:
            return
        done = self.shards[shard].write_back.remote(np.array(keys), pack(update._replace(metrics={})))
        if self.ahead == 0:  # in a fixed order: nothing is drawn before it is there
            ray.get(done)

    def weights(self) -> FlatWeights:
        return self.flat.pack(self.learner.agent.state_dict())

    def state(self) -> tuple[Snapshot, FlatWeights]:
        """Where everybody can read it, with or without a GPU."""
        on_cpu = tree.map(lambda x: x.cpu() if isinstance(x, Tensor) else x, self.learner.state_dict())
        return on_cpu, self.weights()

    def load(self, weights: FlatWeights, state: Snapshot) -> None:
        self.learner.agent.load_state_dict(self.flat.unpack(weights))
        self.learner.load_state_dict(state)

    def init_from(self, weights: dict[str, NDArray[Any]], learnt: Snapshot) -> None:
        init_from(self.learner, unpack(weights), learnt)


class Judge:
    """Plays evaluations in a process of its own."""

    def __init__(self, order: Order, spec: Spec) -> None:
        self.experiment = order.read()
        with torch.random.fork_rng(devices=[]):
            agent = self.experiment.algo.agent(spec, self.experiment.net, self.experiment.core)
        self.flat = Flat(agent.state_dict())
        self.beats = 0  # looks at what has been played, ever

    def play(self, weights: FlatWeights) -> list[Episode]:
        def told_to_stop() -> bool:
            self.beats += 1
            return False

        return prepare(self.experiment, self.flat.unpack(weights), torch.device("cpu"), threads=1)(told_to_stop)

    def pulse(self) -> int:
        """Something that changes while games are played, to be asked for meanwhile."""
        return self.beats
