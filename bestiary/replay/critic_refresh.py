"""When a critic computes value targets and advantages for the episodes of a replay, and where they are stored."""
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bestiary.replay.episode_storage import EpisodeTable, Ints, compacted, concatenated_ranges
from bestiary.types import Snapshot, ValueTargets

MAX_STEPS = 32_768  # time steps, padding included, that are given to the critic at once


@dataclass(frozen=True)
class CriticRefresh:
    """How often the learner's critic is given episodes, and which."""

    period: int
    """updates between two refreshes"""
    store: bool = True
    """all episodes, and the critic's answers are stored; else the ends of a few episodes, and nothing is stored"""
    episodes: int = 4
    """how many those few are"""
    clip: float = 4.0
    """stored advantages are clipped to so many standard deviations"""


class CriticLabels:
    """The critic's value targets and advantages of all transitions, and the state of the current refresh.

    A refresh gives all episodes to the learner, in parts that fit into memory. Answers may come late: after the next
    part has been given out, and for episodes that are no longer held.
    """

    def __init__(self, cfg: CriticRefresh) -> None:
        self.cfg = cfg
        self.values = torch.zeros(0, 3)  # per stored time step: target, standardised advantage, raw advantage
        self.labelled: Ints = np.zeros(0, np.int64)  # numbers of the episodes that have labels
        self.refreshed_at = -1  # updates when the last refresh began
        self.pending: list[Ints] = []  # parts of the refresh that have not been given out: numbers of episodes

    # -- giving out episodes -----------------------------------------------------------------------------------------

    def is_due(self, updates: int) -> bool:
        """Also true where episodes are so short that none with labels is left since the last refresh."""
        expired = self.refreshed_at < 0 or updates - self.refreshed_at >= self.cfg.period
        return not self.pending and (expired or (self.cfg.store and not len(self.labelled)))

    def begin(self, updates: int, table: EpisodeTable) -> None:
        self.refreshed_at = updates
        if self.cfg.store:
            self.pending = partition(table)

    def next_part(self, table: EpisodeTable) -> EpisodeTable | None:
        """The episodes of the next part that are still held; None: all parts have been given out."""
        while self.pending:
            part = table.select(np.isin(table.number, self.pending.pop(0)))
            if len(part.number):
                return part
            if not self.pending and len(self.labelled):  # nobody will answer for this part, which was the last
                self.standardise(table)
        return None

    # -- storing answers ---------------------------------------------------------------------------------------------

    def store(self, keys: Tensor, targets: ValueTargets, table: EpisodeTable, size: int) -> None:
        """Store targets and advantages, [T, B], of the episodes with these numbers; `size`: of the storage."""
        if len(self.values) < size:
            grown = torch.zeros(size, 3)
            grown[: len(self.values)] = self.values
            self.values = grown
        answers = torch.stack((targets.target, targets.advantage)).cpu()
        index = {int(number): i for i, number in enumerate(table.number)}
        at = np.array([index.get(int(key), -1) for key in keys])  # -1: the episode is no longer held
        held = np.flatnonzero(at >= 0)
        length, start = table.length[at[held]], table.start[at[held]]
        column = torch.from_numpy(np.repeat(held, length))
        row = torch.from_numpy(concatenated_ranges(np.zeros_like(length), length))
        target, advantage = answers[:, row, column]
        into = torch.from_numpy(concatenated_ranges(start, length))
        self.values[into] = torch.stack([target, advantage, advantage], -1)
        self.labelled = np.union1d(self.labelled, table.number[at[held]])
        if not self.pending:
            self.standardise(table)

    def standardise(self, table: EpisodeTable) -> None:
        """Divide advantages by their standard deviation over all labelled episodes of this replay.

        Several replays each standardise by themselves. The raw advantages are kept, so that this can be repeated:
        parts that were given out may still be unanswered.
        """
        labelled = self.labelled_episodes(table)
        at = torch.from_numpy(concatenated_ranges(labelled.start, labelled.length))
        raw = self.values[at, 2]
        z = (raw - raw.mean()) / raw.std(correction=0).clamp(min=1e-6)
        self.values[at, 1] = z.clamp(-self.cfg.clip, self.cfg.clip)

    # -- reading -----------------------------------------------------------------------------------------------------

    def labelled_episodes(self, table: EpisodeTable) -> EpisodeTable:
        """Those that may be sampled: all, where nothing is stored."""
        return table.select(np.isin(table.number, self.labelled, assume_unique=True)) if self.cfg.store else table

    def advantages(self, table: EpisodeTable) -> np.ndarray:
        """Standardised advantages of all transitions of these episodes; empty where there are none yet."""
        at = concatenated_ranges(table.start, table.length)
        return self.values[:, 1].numpy()[at] if len(self.values) else np.zeros(0)

    def at(self, index: Ints) -> tuple[Tensor, Tensor]:
        """Targets and standardised advantages of stored time steps."""
        target, advantage, _ = self.values[torch.from_numpy(index)].unbind(-1)
        return target, advantage

    # -- when episodes go or move, and checkpoints -------------------------------------------------------------------

    def keep(self, table: EpisodeTable) -> None:
        self.labelled = np.intersect1d(self.labelled, table.number, assume_unique=True)

    def compact(self, kept: Ints, size: int) -> None:
        if len(self.values):
            self.values = compacted(self.values, kept, size)

    def state_dict(self, used: int) -> Snapshot:  # keys as in checkpoints of 0.1
        return {
            "said": self.values[:used].clone(),
            "judged": torch.from_numpy(self.labelled),
            "surveyed": self.refreshed_at,
            "waiting": [torch.from_numpy(part) for part in self.pending],
        }

    def load_state_dict(self, state: Snapshot) -> None:
        self.values = state["said"].clone()  # as many as there are time steps, or none
        self.labelled = state["judged"].clone().numpy()
        self.refreshed_at = state["surveyed"]
        self.pending = [part.clone().numpy() for part in state["waiting"]]


def partition(table: EpisodeTable) -> list[Ints]:
    """Numbers of all episodes in parts of at most MAX_STEPS, sorted by length so that there is little padding."""
    order = np.argsort(table.length, kind="stable")
    parts: list[Ints] = []
    begin = 0
    for end in range(len(order)):
        if (table.length[order[end]] + 1) * (end - begin + 1) > MAX_STEPS and end > begin:
            parts.append(table.number[order[begin:end]])
            begin = end
    return [*parts, table.number[order[begin:]]]
