"""Ape-X: many environments, each as bold as its rung, and one learner of what surprised them (Horgan et al. 2018)."""

from dataclasses import dataclass

from bestiary.algos.prioritized import FromPriorities


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
    def length(self) -> int:
        return 1

    @property
    def mix(self) -> float:
        return 1.0

    @property
    def remembers(self) -> bool:
        return False

    @property
    def distance(self) -> int:
        return 1
