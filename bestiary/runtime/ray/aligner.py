"""Alignment of trajectories: the trajectories of several actors become one trajectory of all their streams."""

from collections import deque

import torch

from bestiary.replay.fifo import concatenate_streams
from bestiary.types import Trajectory

MAX_QUEUED = 2  # trajectories of one actor that may wait for the slowest actor of its shard


class StreamAligner:
    """Aligns the trajectories of several actors into one batch of environment streams.

    Ring-buffer replays advance all their streams together. A trajectory of all streams is therefore complete when
    every present actor has delivered one. A missing actor's streams are padded with one-step episodes that carry no
    loss; its replacement starts with new episodes.
    """

    def __init__(self, actors: int) -> None:
        self.queues: list[deque[Trajectory]] = [deque() for _ in range(actors)]
        self.present = [False] * actors

    def join(self, actor: int) -> None:
        """Register an actor by its index; trajectories that its predecessor left in the queue are dropped."""
        self.queues[actor].clear()
        self.present[actor] = True

    def leave(self, actor: int) -> None:
        """Remove an actor: the others no longer wait for it."""
        self.queues[actor].clear()
        self.present[actor] = False

    def add(self, actor: int, trajectory: Trajectory) -> None:
        self.queues[actor].append(trajectory)

    def take(self) -> Trajectory | None:
        """One trajectory of all streams; None while a present actor has not delivered one."""
        heads = [queue[0] if queue else None for queue in self.queues]
        example = next((head for head in heads if head is not None), None)
        if example is None or any(p and head is None for p, head in zip(self.present, heads, strict=True)):
            return None
        for queue in self.queues:
            if queue:
                queue.popleft()
        return concatenate_streams([padding_like(example) if head is None else head for head in heads])

    def ahead(self) -> list[int]:
        """Indices of the actors that should pause until the others have caught up."""
        return [actor for actor, queue in enumerate(self.queues) if len(queue) >= MAX_QUEUED]


def padding_like(t: Trajectory) -> Trajectory:
    """A trajectory of the same shape in which every time step is an episode of its own, so no transition is valid."""
    step = t.step._replace(
        prev_action=torch.zeros_like(t.step.prev_action),
        reward=torch.zeros_like(t.step.reward),
        is_first=torch.ones_like(t.step.is_first),
        is_terminal=torch.zeros_like(t.step.is_terminal),
    )
    return t._replace(step=step)
