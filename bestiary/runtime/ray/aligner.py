"""Actors side by side: what several of them played becomes one trajectory of all their streams."""

from collections import deque

import torch

from bestiary.replay.fifo import join
from bestiary.types import Trajectory

AHEAD = 2  # trajectories an actor may be ahead of the slowest beside it


class Lanes:
    """For replays in which all streams turn together.

    A trajectory is there when everybody who is present has played one. A lane without an actor is a run of one-row
    episodes, from which nothing is learnt; whoever takes it over begins with new episodes.
    """

    def __init__(self, count: int) -> None:
        self.waiting: list[deque[Trajectory]] = [deque() for _ in range(count)]
        self.present = [False] * count

    def join(self, lane: int) -> None:
        """Somebody new plays here; what the one before had left is given up."""
        self.waiting[lane].clear()
        self.present[lane] = True

    def leave(self, lane: int) -> None:
        self.waiting[lane].clear()
        self.present[lane] = False

    def add(self, lane: int, trajectory: Trajectory) -> None:
        self.waiting[lane].append(trajectory)

    def take(self) -> Trajectory | None:
        """One of all streams, if everybody who is present has played one."""
        heads = [queue[0] if queue else None for queue in self.waiting]
        known = next((head for head in heads if head is not None), None)
        if known is None or any(here and head is None for here, head in zip(self.present, heads, strict=True)):
            return None
        for queue in self.waiting:
            if queue:
                queue.popleft()
        return join([nothing_like(known) if head is None else head for head in heads])

    def ahead(self) -> list[int]:
        """Lanes that should wait for the others."""
        return [lane for lane, queue in enumerate(self.waiting) if len(queue) >= AHEAD]


def nothing_like(t: Trajectory) -> Trajectory:
    """As many rows of as many streams, each an episode of its own."""
    step = t.step._replace(
        prev_action=torch.zeros_like(t.step.prev_action),
        reward=torch.zeros_like(t.step.reward),
        is_first=torch.ones_like(t.step.is_first),
        is_terminal=torch.zeros_like(t.step.is_terminal),
    )
    return t._replace(step=step)
