"""The overlapped runtime: the actor and the learner run in two threads that share the replay."""

import copy
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from bestiary.config.experiment import Experiment
from bestiary.runtime.local import LocalRuntime, MetricMeans
from bestiary.types import Batch, Episode, Progress, Snapshot, Update


class OverlapRuntime(LocalRuntime):
    """The local runtime with the actor in a thread of its own.

    The actor waits while the replay is full, and the learner waits while it is empty, which bounds the policy lag.
    Weights are published as a copy after each update, so the actor never reads weights that are being updated. An
    error in the actor's thread is raised in the learner's thread at once.
    """

    exact_resume = False  # the actor's thread is in the middle of a trajectory: a resumed run starts new episodes

    def __init__(self, experiment: Experiment) -> None:
        self.changed = threading.Condition()  # guards the replay and all attributes below
        self.episodes: list[Episode] = []
        self.failure: BaseException | None = None
        self.stopping = False
        self.thread: threading.Thread | None = None
        super().__init__(experiment)

    def __iter__(self) -> Iterator[Progress]:
        self._publish()
        self.reported_steps = self.steps  # in the last Progress
        self.thread = threading.Thread(target=self._act, name="actor", daemon=True)
        self.thread.start()
        try:
            means = MetricMeans()
            while self.frames < self.experiment.frames:
                batch = self._sample()
                if batch is not None:
                    self._update(batch, means)
                    self._publish()
                if self.steps > self.reported_steps:
                    with self.changed:
                        episodes, self.episodes = self.episodes, []
                        self.reported_steps, frames = self.steps, self.frames
                    metrics = self._metrics(means)
                    yield Progress(frames, self.reported_steps, self.learner.updates, episodes, metrics)
        finally:
            self._join()

    def _sample(self) -> Batch | None:
        """A batch; None if no update was due, once the actor has added another trajectory."""
        with self.changed:
            batch = self.replay.sample()
            self.changed.notify_all()
            if batch is None:
                before = self.steps
                self.changed.wait_for(lambda: self.failure or self.steps > before)
            if self.failure:
                raise self.failure
            return batch

    def _write_back(self, keys: Tensor, update: Update) -> None:
        with self.changed:
            super()._write_back(keys, update)

    def state_dict(self, at_rest: bool = True, with_replay: bool = True) -> Snapshot:
        with self.changed:
            return copy.deepcopy(super().state_dict(at_rest, with_replay))  # the actor keeps writing into the replay

    def _publish(self) -> None:
        weights = {k: v.detach().clone() for k, v in self.learner.agent.state_dict().items()}
        self.published = (weights, self.learner.updates)

    def _act(self) -> None:
        torch.set_num_threads(max(1, self.threads // 2))  # in this thread only
        try:
            while not self.stopping:
                self.actor.load(*self.published)
                trajectory, episodes = self.actor.unroll()
                with self.changed:
                    self.changed.wait_for(lambda: self.stopping or not self.replay.full)
                    self._add(trajectory)
                    self.episodes += episodes
                    self.changed.notify_all()
        except BaseException as e:  # the learner's thread raises it
            with self.changed:
                self.failure = e
                self.changed.notify_all()

    def _join(self) -> None:
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join()

    def close(self) -> None:
        self._join()
        super().close()
