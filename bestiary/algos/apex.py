"""Ape-X: many environments, each as bold as its rung, and one learner of what surprised them (Horgan et al. 2018)."""

from dataclasses import dataclass

from bestiary.algos.prioritized import FromPriorities, Item


@dataclass(frozen=True)
class Apex(FromPriorities):
    """Double, dueling Q-learning from single moves, drawn by their error. Memory reaches as far back as the burn-in."""

    unroll: int = 20
    batch_size: int = 512
    """moves per update"""
    burn_in: int = 3
    """rows before a move from which frames, or memory, are filled"""
    ratio: float = 0.0015

    @property
    def item(self) -> Item:
        return Item(length=1, stride=1, eta=1.0, stored_state=False)
