"""The local runtime: one process alternates between acting, replay and learning."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bestiary import tree
from bestiary.acting.actor import Actor
from bestiary.algos.base import Learner, load_weights
from bestiary.config.experiment import Experiment
from bestiary.config.machine import choose_device, cores, set_threads, tune_malloc
from bestiary.replay.base import Replay
from bestiary.runtime.evaluation import ThreadedEvaluation, prepare
from bestiary.seeding import ACTIONS, LEARNING, TRAIN, WEIGHTS, derive
from bestiary.training.run import Run
from bestiary.types import Batch, Episode, Metrics, Progress, Snapshot, Spec, Trajectory, Update


class MetricMeans:
    """Means of metrics over several updates. They stay tensors until `take`, so that a GPU need not synchronize."""

    def __init__(self) -> None:
        self.sums: Metrics = {}
        self.count = 0

    def add(self, metrics: Metrics) -> None:
        self.sums = {k: v + self.sums[k] for k, v in metrics.items()} if self.sums else dict(metrics)
        self.count += 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {k: (v / self.count).item() for k, v in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


def reseed(seed: int, device: torch.device) -> None:
    """Seed the global generators of the CPU and of one device; `torch.manual_seed` seeds all devices and is slower."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def build_learner(experiment: Experiment, spec: Spec, device: torch.device) -> Learner:
    """The experiment's learner. Its agent's initial weights depend on the experiment's seed alone.

    If the algorithm's settings name a `reference_run`, the learner receives that run's experiment and last checkpoint.
    """
    torch.manual_seed(derive(experiment.seed, WEIGHTS))
    agent = experiment.algo.agent(spec, experiment.net, experiment.core).to(device)
    learner: Any = experiment.algo.learner(agent, max(1, experiment.frames // spec.frames_per_step))
    if (path := getattr(experiment.algo, "reference_run", None)) is not None:
        run = Run(path)
        reference, checkpoint = run.experiment(), run.load()
        learner.load_reference(reference, checkpoint.weights, checkpoint.meta["frames"])
    return learner


def learn(learner: Learner, batch: Batch, seed: int, device: torch.device) -> Update:
    """One update. Adds the metric `policy_lag`: updates made since the weights that acted, mean over the batch."""
    lag = learner.updates - batch.trajectory.version.float().mean()
    # dropout samples from the global generator: a seed per update makes it independent of everything else
    reseed(derive(seed, LEARNING, learner.updates), device)
    update = learner.update(tree.to_device(batch, device))
    # an update without metrics changed no weights: it only evaluated a critic
    return update._replace(metrics=update.metrics | {"policy_lag": lag}) if update.metrics else update


def write_back(replay: Replay, keys: Tensor, update: Update) -> None:
    """Send priorities and value targets of the sampled items back to their replay."""
    if update.priorities is not None:
        replay.update_priorities(keys, update.priorities)
    if update.value_targets is not None:
        replay.set_value_targets(keys, update.value_targets)


def init_from(learner: Learner, weights: dict[str, Tensor], learner_state: Snapshot) -> None:
    """Load the weights and the learner state of another run, except its optimizer and its counters of updates."""
    load_weights(learner.agent, weights, "than this experiment's")
    fresh = {k: v for k, v in learner.state_dict().items() if k in ("optimizer", "updates", "steps")}
    learner.load_state_dict({**learner_state, **fresh})


class LocalRuntime:
    """Runs the parts of an experiment in a fixed order; a generator of Progress.

    Nothing runs between two values of Progress, so a run that is resumed from a `state_dict` taken there equals an
    uninterrupted one bit for bit.
    """

    exact_resume = True  # whether a resumed run equals an uninterrupted one
    startup_messages: tuple[str, ...] = ()
    notes: Sequence[str] = ()
    evaluates_remotely = False

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        runtime = experiment.runtime
        tune_malloc()
        self.device = choose_device(runtime.device)
        self.frames = self.steps = 0
        self.resumes = 0
        self._build_env_batch()
        self.threads = set_threads(runtime.threads, self.spec)
        try:
            self.learner = build_learner(experiment, self.spec, self.device)
            initial_state = self.learner.agent.initial_state(1)
            self.replay = experiment.algo.replay_builder(runtime.envs).build(experiment.seed, self.spec, initial_state)
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
            means = MetricMeans()
            while (batch := self.replay.sample()) is not None:
                self._update(batch, means)
            yield Progress(self.frames, self.steps, self.learner.updates, episodes, self._metrics(means))

    def _metrics(self, means: MetricMeans) -> dict[str, float]:
        """Metrics of a Progress; empty if there was no update."""
        learner = means.take()
        return learner | self.replay.metrics() | self.env_batch.component_means() if learner else {}

    def _add(self, trajectory: Trajectory) -> None:
        length, streams = trajectory.action.shape  # the last time step is the next trajectory's first
        self.replay.add(trajectory)
        self.steps += (length - 1) * streams
        self.frames = self.steps * self.spec.frames_per_step

    def _update(self, batch: Batch, means: MetricMeans) -> None:
        update = learn(self.learner, batch, self.experiment.seed, self.device)
        if update.metrics:
            means.add(update.metrics)
        if batch.keys is not None:
            self._write_back(batch.keys, update)

    def _write_back(self, keys: Tensor, update: Update) -> None:
        write_back(self.replay, keys, update)

    def init_from(self, weights: dict[str, Tensor], learner_state: Snapshot) -> None:
        init_from(self.learner, weights, learner_state)

    @property
    def updates(self) -> int:
        return self.learner.updates

    @property
    def replay_bytes(self) -> int:
        """Size of the replay's contents in bytes."""
        return self.replay.bytes

    def evaluate(self, weights: dict[str, Tensor], stop: Callable[[], bool]) -> list[Episode]:
        """Episodes of an evaluation; fewer than requested if `stop` returned True."""
        return prepare(self.experiment, weights, self.device, self.threads)(stop)

    def evaluate_async(self, weights: dict[str, Tensor]) -> ThreadedEvaluation:
        """Start an evaluation in a background thread."""
        return ThreadedEvaluation(self.experiment, self.frames, weights, self.device)

    def weights(self) -> dict[str, Tensor]:
        return self.learner.agent.state_dict()

    def state_dict(self, at_rest: bool = True, with_replay: bool = True) -> Snapshot:
        """State for resuming. `at_rest=False`, after an error: without the replay and the unfinished episodes."""
        state: Snapshot = {
            "steps": self.steps,
            "resumes": self.resumes,
            "rng": torch.get_rng_state(),
            "learner": self.learner.state_dict(),
        }
        if at_rest:
            if with_replay:
                state["replay"] = self.replay.state_dict()
            # exploration statistics, such as visit counts, remain valid in new episodes
            explorer = {"explorer": self.explorer.state_dict()}
            state["actor"] = self.actor.state_dict() if self.exact_resume and self.env_batch.resumable else explorer
        return state

    def load_state_dict(self, weights: dict[str, Tensor], state: Snapshot) -> None:
        self.learner.agent.load_state_dict(weights)
        self.learner.load_state_dict(state["learner"])
        self.steps = state["steps"]
        self.frames = self.steps * self.spec.frames_per_step
        self.resumes = state["resumes"] + 1
        if "replay" in state:
            self.replay.load_state_dict(state["replay"])
        if self.can_continue(state):
            self.actor.load_state_dict(state["actor"])
        else:  # new episodes, with seeds not used before
            self.env_batch.close()
            self._build_env_batch()
            self._build_actor()
            self.explorer.load_state_dict(state.get("actor", {}).get("explorer", {}))
        self.actor.load(self.learner.agent.state_dict(), self.learner.updates)
        torch.set_rng_state(state["rng"])

    def can_continue(self, state: Snapshot) -> bool:
        """Whether the saved run's unfinished episodes can continue: saved at rest, with as many environments."""
        last_step = state.get("actor", {}).get("current")
        resumable = self.exact_resume and self.env_batch.resumable
        return resumable and last_step is not None and len(last_step[1]) == self.env_batch.num_envs

    def close(self) -> None:
        self.env_batch.close()
