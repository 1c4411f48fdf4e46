"""The worker processes: actors, replay shards, learners and the evaluator. These classes are plain; Ray wraps them."""

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
from bestiary.config.machine import choose_device, set_threads, tune_malloc
from bestiary.config.plugins import load_file, load_plugins
from bestiary.ops.collective import SINGLE_PROCESS
from bestiary.runtime import Ray
from bestiary.runtime.collective import join, rendezvous
from bestiary.runtime.evaluation import prepare
from bestiary.runtime.local import MetricMeans, build_learner, init_from, learn, write_back
from bestiary.runtime.ray.aligner import StreamAligner
from bestiary.runtime.ray.wire import FlatWeights, WeightsCodec, pack, unpack
from bestiary.seeding import ACTIONS, TRAIN, derive, substream
from bestiary.types import Batch, Episode, Snapshot, Spec, Trajectory, Update


class WorkerSpec(NamedTuple):
    """What every worker needs to start. The experiment is JSON, so it can hold nothing but settings."""

    experiment: str
    plugins: tuple[str, ...]  # plugin files to import

    def load(self) -> Experiment:
        """Prepare this process and return the experiment."""
        load_plugins()
        for file in self.plugins:
            load_file(file)
        tune_malloc()
        return Experiment.from_json(self.experiment)


def ray_config(experiment: Experiment) -> Ray:
    assert isinstance(experiment.runtime, Ray)
    return experiment.runtime


class RolloutResult(NamedTuple):
    """The small part of a rollout's result; the trajectory itself is a second result that stays in shared memory."""

    steps: int  # agent steps, over all environments
    episodes: list[Episode]
    env_metrics: dict[str, float]
    seconds: float


class ActorWorker:
    """An actor in a process of its own."""

    def __init__(
        self,
        worker_spec: WorkerSpec,
        number: int,
        restarts: int,
        resumes: int,
        explorer: Snapshot,
        inference_server: Any = None,
    ) -> None:
        """`restarts` counts the actors this one replaces; with an inference server the actor has no policy itself."""
        experiment = worker_spec.load()
        runtime, algo, seed = ray_config(experiment), experiment.algo, experiment.seed
        first = number == restarts == 0  # a single actor sees the episodes of the local runtime
        usual = TRAIN if resumes == 0 else derive(TRAIN, resumes)
        stream = usual if first else substream(TRAIN, number, restarts, resumes)
        rng = derive(seed, ACTIONS, resumes) if first else derive(seed, ACTIONS, resumes, number, restarts)
        threads = max(1, round(runtime.actor_cpus))
        self.env_batch = experiment.env.make(runtime.envs, seed, stream, threads)
        torch.get_num_threads()
        torch.set_num_threads(threads)
        agent = algo.agent(self.env_batch.spec, experiment.net, experiment.core)
        self.codec = WeightsCodec(agent.state_dict())
        self.explorer = algo.explorer(runtime.actors * runtime.envs).part(number * runtime.envs, runtime.envs)
        self.explorer.load_state_dict(explorer)
        cpu = torch.device("cpu")
        self.has_policy = inference_server is None
        if self.has_policy:
            self.actor = Actor(self.env_batch, agent, self.explorer, algo.unroll, rng, cpu)
        else:
            from bestiary.runtime.ray.inference import RemotePolicyActor

            remote = RemotePolicyActor(self.env_batch, agent, self.explorer, algo.unroll, rng, cpu)
            self.actor = remote.use_server(inference_server, (number, restarts))
        self.actor.version = -1  # no weights yet

    def rollout(self, version: int, weights: FlatWeights) -> tuple[RolloutResult, Trajectory]:
        """Collect one trajectory with the given weights."""
        started = time.perf_counter()
        if self.has_policy and version != self.actor.version:
            self.actor.load(self.codec.decode(weights), version)
        trajectory, episodes = self.actor.unroll()
        length, streams = trajectory.action.shape
        packed = pack(trajectory)
        seconds = time.perf_counter() - started
        return RolloutResult((length - 1) * streams, episodes, self.env_batch.component_means(), seconds), packed

    def explorer_state(self) -> Snapshot:
        return self.explorer.state_dict()


class AddResult(NamedTuple):
    full: bool  # whether actors should pause because learning lags behind collection
    ahead: list[int]  # actors of the shard, by index, that should pause for slower ones


class ShardStatus(NamedTuple):
    full: bool  # as in AddResult
    bytes: int
    metrics: dict[str, float]


class SampleResult(NamedTuple):
    batch: Batch | None  # None: no update is due
    status: ShardStatus


class ReplayShard:
    """A replay in a process of its own, for some of the actors."""

    def __init__(self, worker_spec: WorkerSpec, spec: Spec, number: int) -> None:
        experiment = worker_spec.load()
        runtime = ray_config(experiment)
        initial_state = experiment.algo.agent(spec, experiment.net, experiment.core).initial_state(1)
        seed = experiment.seed if number == 0 else derive(experiment.seed, number)
        config = experiment.algo.replay_builder(runtime.streams).share(*runtime.shards_and_learners)
        self.replay = config.build(seed, spec, initial_state)
        self.envs = runtime.envs
        self.aligner = StreamAligner(runtime.streams // runtime.envs)

    def join(self, actor: int) -> None:
        """Expect trajectories of an actor, given by its index within this shard."""
        self.aligner.join(actor)

    def leave(self, actor: int) -> AddResult:
        """Expect no more trajectories of an actor; a trajectory that only waited for it is added."""
        self.aligner.leave(actor)
        self._add_aligned()
        return self._add_result()

    def add(self, actor: int, packed: Trajectory) -> AddResult:
        if not self.replay.aligned:
            self.replay.add(unpack(packed), actor * self.envs)
        elif self.aligner.present[actor]:  # else the trajectory is from an actor that was given up
            self.aligner.add(actor, unpack(packed))
            self._add_aligned()
        return self._add_result()

    def _add_result(self) -> AddResult:
        return AddResult(self.replay.full, self.aligner.ahead())

    def _add_aligned(self) -> None:
        while (t := self.aligner.take()) is not None:
            self.replay.add(t)

    def sample(self) -> SampleResult:
        batch = self.replay.sample()
        packed = None if batch is None else pack(batch)
        return SampleResult(packed, ShardStatus(self.replay.full, self.replay.bytes, self.replay.metrics()))

    def write_back(self, keys: NDArray[Any], update: Update) -> None:
        """Set the priorities and value targets of sampled items."""
        write_back(self.replay, unpack(keys), unpack(update))

    def state(self) -> Snapshot:
        return self.replay.state_dict()

    def load(self, state: Snapshot) -> None:
        self.replay.load_state_dict(state)


class LearnResult(NamedTuple):
    """The result of one call of `LearnerWorker.learn`."""

    updates: int  # since the start of the run
    changed: bool  # whether this call made an update
    metrics: dict[str, float]
    status: dict[int, ShardStatus]  # of the shards that were sampled
    lost: list[int]  # shards that no longer answer
    idle: float  # fraction of the time in which there was nothing to learn from
    more: bool  # whether more updates may be due, because the time limit ended the call


class LearnerWorker:
    """A learner in a process of its own. It fetches batches from the replay shards itself, one ahead.

    Several learners each take a batch and make one joint update, as soon as each of them has a batch.
    """

    def __init__(self, worker_spec: WorkerSpec, spec: Spec, rank: int = 0) -> None:
        self.experiment = worker_spec.load()
        self.cfg = ray_config(self.experiment)
        self.device = choose_device(self.cfg.device)
        set_threads(self.cfg.threads, spec)
        self.learner = build_learner(self.experiment, spec, self.device)
        self.codec = WeightsCodec(self.learner.agent.state_dict())
        self.prefetch = 0 if self.cfg.lockstep else 1
        self.rank = rank
        self.collective = SINGLE_PROCESS
        self.unused: tuple[int, Batch] | None = None  # a batch for which the other learners had none
        self.shards: dict[int, Any] = {}
        self.next_shard = 0  # index into `shards`
        self.requested: list[tuple[int, Any]] = []  # batches under way: shard, reference

    def use_shards(self, shards: dict[int, Any]) -> None:
        """Sample from these replay shards, given by their numbers."""
        self.shards, self.requested, self.unused = shards, [], None
        self.next_shard = self.rank % len(shards)

    def rendezvous(self) -> str:
        """An address on this node where the learners can form a group."""
        return rendezvous(ray.util.get_node_ip_address())

    def join_group(self, address: str) -> None:
        """Form a group with the other learners; all continue from the state of rank 0."""
        self.collective = join(self.rank, self.cfg.learners, address, self.device, self.cfg.timeout)
        self.collective.broadcast_state(self.learner)

    def learn(self, seconds: float) -> tuple[LearnResult, FlatWeights | None]:
        """Update until no update is due or the time is over; returns the weights too if they have changed."""
        before, started = self.learner.updates, time.perf_counter()
        means, status, lost = MetricMeans(), {}, []
        # shards that had nothing, in a row; answers that were requested before this call do not count
        busy, empty, all_empty = 0.0, 0, len(self.shards) + len(self.requested)
        while True:
            over = time.perf_counter() - started >= seconds or bool(lost) or empty >= all_empty
            shard, batch = self.unused or ((0, None) if over else self._fetch(status, lost))
            self.unused = None
            if batch is None and not over:
                empty += 1
                continue
            if not self._all_have_a_batch(batch, over):
                self.unused = None if batch is None else (shard, batch)
                break
            assert batch is not None
            empty, all_empty, began = 0, len(self.shards), time.perf_counter()
            update = learn(self.learner, unpack(batch), self.experiment.seed, self.device)
            if update.metrics:
                means.add(update.metrics)
            if batch.keys is not None:
                self._write_back(shard, batch.keys, update)
            busy += time.perf_counter() - began
        passed = time.perf_counter() - started
        changed, idle = self.learner.updates > before, 1 - busy / max(passed, 1e-9)
        more = passed >= seconds and empty < all_empty and not lost
        result = LearnResult(self.learner.updates, changed, means.take(), status, lost, idle, more)
        return result, self.weights() if changed else None

    def _all_have_a_batch(self, batch: Batch | None, over: bool) -> bool:
        if batch is not None and batch.is_critic_refresh:
            return True  # such a batch makes no joint update: each learner processes its own
        ready = batch is not None and not over
        return self.collective.all_reduce_sum(torch.tensor(float(ready))).item() == self.collective.size

    def _fetch(self, status: dict[int, ShardStatus], lost: list[int]) -> tuple[int, Batch | None]:
        """The next batch; the one after it is already requested."""
        while len(self.requested) <= self.prefetch:
            shard = list(self.shards)[self.next_shard]
            self.requested.append((shard, self.shards[shard].sample.remote()))
            self.next_shard = (self.next_shard + 1) % len(self.shards)
        shard, ref = self.requested.pop(0)
        try:
            batch, status[shard] = ray.get(ref, timeout=self.cfg.timeout)
        except (RayActorError, GetTimeoutError, ObjectLostError):
            lost.append(shard)
            return shard, None
        return shard, batch

    def _write_back(self, shard: int, keys: Any, update: Update) -> None:
        if update.priorities is None and update.value_targets is None:
            return
        done = self.shards[shard].write_back.remote(np.array(keys), pack(update._replace(metrics={})))
        if self.prefetch == 0:  # lockstep: the next sample sees the new priorities
            ray.get(done)

    def weights(self) -> FlatWeights:
        return self.codec.encode(self.learner.agent.state_dict())

    def state(self) -> Snapshot:
        """The learner's state on the CPU, which every process can read."""
        return tree.map(lambda x: x.cpu() if isinstance(x, Tensor) else x, self.learner.state_dict())

    def load(self, weights: FlatWeights, state: Snapshot) -> None:
        self.learner.agent.load_state_dict(self.codec.decode(weights))
        self.learner.load_state_dict(state)

    def init_from(self, weights: dict[str, NDArray[Any]], learner_state: Snapshot) -> None:
        """Start from the weights and the learner state of another run."""
        init_from(self.learner, unpack(weights), learner_state)


class EvaluatorWorker:
    """Runs evaluations in a process of its own."""

    def __init__(self, worker_spec: WorkerSpec, spec: Spec) -> None:
        self.experiment = worker_spec.load()
        with torch.random.fork_rng(devices=[]):
            agent = self.experiment.algo.agent(spec, self.experiment.net, self.experiment.core)
        self.codec = WeightsCodec(agent.state_dict())
        self.ticks = 0

    def evaluate(self, weights: FlatWeights) -> list[Episode]:
        def tick() -> bool:
            self.ticks += 1
            return False  # do not stop

        return prepare(self.experiment, self.codec.decode(weights), torch.device("cpu"), threads=1)(tick)

    def heartbeat(self) -> int:
        """A number that grows while an evaluation makes progress; called concurrently with `evaluate`."""
        return self.ticks
