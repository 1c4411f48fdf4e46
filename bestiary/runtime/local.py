"""The loop, whole: weights go in, trajectories come out, and priorities flow back."""

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.algos.base import Learner, load_weights
from bestiary.algos.impala import ImpalaLearner
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, cores, keep_memory, set_threads
from bestiary.replay.base import Replay
from bestiary.runtime.evaluation import ThreadedEvaluation, prepare
from bestiary.runtime.reference import load_reference
from bestiary.seeding import ACTIONS, LEARNING, TRAIN, WEIGHTS, derive
from bestiary.types import Batch, Episode, Metrics, Progress, Snapshot, Spec, Trajectory, Update


class Means:
    """Running means of metrics, kept as tensors until someone asks."""

    def __init__(self) -> None:
        self.sums: Metrics = {}
        self.count = 0

    def add(self, metrics: Metrics) -> None:
        self.sums = {k: v + self.sums[k] for k, v in metrics.items()} if self.sums else dict(metrics)
        self.count += 1

    def take(self) -> dict[str, float]:
        means = {k: (v / self.count).item() for k, v in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


def reseed(seed: int, device: torch.device) -> None:
    """The global streams of the processor and of one device; to ask for all, as torch does, takes far longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def build_learner(experiment: Experiment, spec: Spec, device: torch.device) -> Learner:
    """With the weights that belong to the experiment's seed, and with the reference policy if there is one."""
    torch.manual_seed(derive(experiment.seed, WEIGHTS))
    agent = experiment.algo.agent(spec, experiment.net, experiment.core).to(device)
    learner = experiment.algo.learner(agent, max(1, experiment.frames // spec.frames_per_step))
    if isinstance(learner, ImpalaLearner):
        load_reference(learner)
    return learner


def learn(learner: Learner, batch: Batch, seed: int, device: torch.device) -> Update:
    """One update, with how old the weights were that played what it learns from."""
    lag = learner.updates - batch.trajectory.version.float().mean()
    # dropout draws from the global stream: an address of its own makes it independent of all else
    reseed(derive(seed, LEARNING, learner.updates), device)
    update = learner.update(tree.to_device(batch, device))
    # without metrics nothing was learnt, only judged
    return update._replace(metrics=update.metrics | {"policy_lag": lag}) if update.metrics else update


def write_back(replay: Replay, keys: Tensor, update: Update) -> None:
    """Send priorities and value targets of the sampled items back to their replay."""
    if update.priorities is not None:
        replay.update_priorities(keys, update.priorities)
    if update.value_targets is not None:
        replay.set_value_targets(keys, update.value_targets)


def init_from(learner: Learner, weights: dict[str, Tensor], learnt: Snapshot) -> None:
    """What another run has learnt, under this experiment's own schedules."""
    load_weights(learner.agent, weights, "than this experiment's")
    fresh = {k: v for k, v in learner.state_dict().items() if k in ("optimizer", "updates", "steps")}
    learner.load_state_dict({**learnt, **fresh})


class LocalRuntime:
    """Builds the parts of an experiment and runs them in a fixed order; a generator of Progress.

    Between two Progress everything is at rest, so `state_dict` taken there continues bit for bit.
    """

    exact_resume = True  # whether a resumed run equals an uninterrupted one
    startup_messages: tuple[str, ...] = ()  # what a person should know before it starts
    notes: Sequence[str] = ()  # what became known since the last Progress
    evaluates_remotely = False  # whether evaluations are played elsewhere, so that training need not wait for them

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        runtime = experiment.runtime
        keep_memory()
        self.device = choose_device(runtime.device)
        self.frames = self.steps = 0
        self.resumes = 0
        self._build_env_batch()
        self.threads = set_threads(runtime.threads, self.spec)
        try:
            self.learner = build_learner(experiment, self.spec, self.device)
            memory = self.learner.agent.initial_state(1)
            self.replay = experiment.algo.replay_builder(runtime.envs).build(experiment.seed, self.spec, memory)
            self._build_actor()
        except BaseException:
            self.close()
            raise

    def _build_env_batch(self) -> None:
        e = self.experiment
        stream = TRAIN if self.resumes == 0 else derive(TRAIN, self.resumes)
        self.env_batch = e.env.make(e.runtime.envs, e.seed, stream, e.runtime.threads or cores())
        self.spec = self.env_batch.spec

    def _build_actor(self) -> None:
        e = self.experiment
        agent = copy.deepcopy(self.learner.agent)
        self.explorer = e.algo.explorer(e.runtime.envs)
        seed = derive(e.seed, ACTIONS, self.resumes)
        self.actor = Actor(self.env_batch, agent, self.explorer, e.algo.unroll, seed, self.device)

    def __iter__(self) -> Iterator[Progress]:
        while self.frames < self.experiment.frames:
            self.actor.load(self.learner.agent.state_dict(), self.learner.updates)
            trajectory, episodes = self.actor.unroll()
            self._add(trajectory)
            means = Means()
            while (batch := self.replay.sample()) is not None:
                self._update(batch, means)
            yield Progress(self.frames, self.steps, self.learner.updates, episodes, self._told(means))

    def _told(self, means: Means) -> dict[str, float]:
        learnt = means.take()
        return learnt | self.replay.metrics() | self.env_batch.tally() if learnt else {}

    def _add(self, trajectory: Trajectory) -> None:
        rows, streams = trajectory.action.shape
        self.replay.add(trajectory)
        self.steps += (rows - 1) * streams
        self.frames = self.steps * self.spec.frames_per_step

    def _update(self, batch: Batch, means: Means) -> None:
        update = learn(self.learner, batch, self.experiment.seed, self.device)
        if update.metrics:
            means.add(update.metrics)
        if batch.keys is not None:
            self._write_back(batch.keys, update)

    def _write_back(self, keys: Tensor, update: Update) -> None:
        write_back(self.replay, keys, update)

    def init_from(self, weights: dict[str, torch.Tensor], learnt: Snapshot) -> None:
        init_from(self.learner, weights, learnt)

    @property
    def updates(self) -> int:
        return self.learner.updates

    @property
    def replay_bytes(self) -> int:
        """Bytes of what was played and is kept."""
        return self.replay.bytes

    def evaluate(self, weights: dict[str, Tensor], stop: Callable[[], bool]) -> list[Episode]:
        """Games of an evaluation; fewer than planned if told to stop."""
        return prepare(self.experiment, weights, self.device, self.threads)(stop)

    def evaluate_async(self, weights: dict[str, Tensor]) -> ThreadedEvaluation:
        """Begin an evaluation while training goes on."""
        return ThreadedEvaluation(self.experiment, self.frames, weights, self.device)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.learner.agent.state_dict()

    def state_dict(self, at_rest: bool = True, with_replay: bool = True) -> Snapshot:
        """What a resumed run needs; when something broke mid-way, without the episodes under way and their like."""
        state: Snapshot = {
            "steps": self.steps,
            "resumes": self.resumes,
            "rng": torch.get_rng_state(),
            "learner": self.learner.state_dict(),
        }
        if at_rest:
            if with_replay:
                state["replay"] = self.replay.state_dict()
            # what has been seen counts in new episodes too
            explorer = {"explorer": self.explorer.state_dict()}
            state["actor"] = self.actor.state_dict() if self.exact_resume and self.env_batch.resumable else explorer
        return state

    def load_state_dict(self, weights: dict[str, torch.Tensor], state: Snapshot) -> None:
        self.learner.agent.load_state_dict(weights)
        self.learner.load_state_dict(state["learner"])
        self.steps = state["steps"]
        self.frames = self.steps * self.spec.frames_per_step
        self.resumes = state["resumes"] + 1
        if "replay" in state:
            self.replay.load_state_dict(state["replay"])
        if self.can_continue(state):
            self.actor.load_state_dict(state["actor"])
        else:  # fresh episodes, on seeds not yet used
            self.env_batch.close()
            self._build_env_batch()
            self._build_actor()
            self.explorer.load_state_dict(state.get("actor", {}).get("explorer", {}))
        self.actor.load(self.learner.agent.state_dict(), self.learner.updates)
        torch.set_rng_state(state["rng"])

    def can_continue(self, state: Snapshot) -> bool:
        """Whether the running episodes of a saved run can go on here: same environments, and saved at rest."""
        row = state.get("actor", {}).get("row")
        able = self.exact_resume and self.env_batch.resumable
        return able and row is not None and len(row[1]) == self.env_batch.num_envs

    def close(self) -> None:
        self.env_batch.close()
