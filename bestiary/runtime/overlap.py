"""Acting and learning at the same time, in two threads that meet at a bounded queue."""

import queue
import threading
from collections.abc import Iterator

import torch

from bestiary.experiment import Experiment
from bestiary.runtime import Overlap
from bestiary.runtime.local import LocalRuntime
from bestiary.types import Episode, Progress, Trajectory


class OverlapRuntime(LocalRuntime):
    """The same parts, with the actor in a thread of its own.

    Weights are published as a copy after each learning phase, so an actor never sees half an update.
    The queue bounds how old a trajectory can become. A failure in the actor is raised here, at once.
    """

    exact = False  # episodes are under way in the other thread: a resumed run starts new ones

    def __init__(self, experiment: Experiment) -> None:
        assert isinstance(experiment.runtime, Overlap)
        self.finished: queue.Queue[tuple[Trajectory, list[Episode]] | BaseException] = queue.Queue(
            experiment.runtime.depth
        )
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        super().__init__(experiment)

    def __iter__(self) -> Iterator[Progress]:
        self._publish()
        self.thread = threading.Thread(target=self._act, name="actor", daemon=True)
        self.thread.start()
        try:
            while self.frames < self.experiment.frames:
                item = self.finished.get()
                if isinstance(item, BaseException):
                    raise item
                trajectory, episodes = item
                metrics = self._learn(trajectory)
                self._publish()
                metrics |= {"queue": float(self.finished.qsize())} if metrics else {}
                yield Progress(self.frames, self.steps, self.learner.updates, episodes, metrics)
        finally:
            self._join()

    def _publish(self) -> None:
        weights = {k: v.detach().clone() for k, v in self.learner.agent.state_dict().items()}
        self.published = (weights, self.learner.updates)

    def _act(self) -> None:
        torch.set_num_threads(max(1, self.threads // 2))  # of this thread alone
        try:
            while not self.stop.is_set():
                self.actor.load(*self.published)
                self._put(self.actor.unroll())
        except BaseException as e:  # the learner's thread raises it
            self._put(e)

    def _put(self, item: tuple[Trajectory, list[Episode]] | BaseException) -> None:
        while not self.stop.is_set():
            try:
                self.finished.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _join(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join()

    def close(self) -> None:
        self._join()
        super().close()
