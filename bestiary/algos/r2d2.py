"""R2D2: Ape-X on sequences, with the memory the actor had where they begin (Kapturowski et al. 2019)."""

from dataclasses import dataclass

from bestiary.algos.prioritized import FromPriorities, Item
from bestiary.errors import UserError


@dataclass(frozen=True)
class R2d2(FromPriorities):
    """Recurrent Q-learning from stored sequences. The first rows only bring memory up to date."""

    batch_size: int = 64
    """sequences per update"""
    window: int = 120
    """moves per sequence: those of the burn-in, and those that are trained"""
    burn_in: int = 40
    """rows at the start of a sequence that only bring memory up to date"""
    stride: int | None = None
    """moves between the starts of two sequences; None: as many as are trained, so that each is in one"""
    stored_state: bool | None = None
    """begin with the memory the actor had; None: unless it takes more than 1 GiB and than all rows; else with none"""
    ratio: float = 0.00015
    discount: float | None = 0.997
    n_step: int = 5
    rescale: float | None = 1e-3
    alpha: float = 0.9
    beta: float = 0.6
    eta: float = 0.9
    """of the largest error of a sequence in its priority; the rest is of their mean"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_shares("eta")
        if self.burn_in + self.n_step > self.window:
            raise UserError(
                f"algo.burn-in={self.burn_in} and algo.n-step={self.n_step} are longer than algo.window={self.window}: "
                f"raise that to {self.burn_in + self.n_step} or more"
            )
        if self.item.stride < 1:
            raise UserError(f"algo.stride={self.stride} must be at least 1")
        if self.stored_state is not False and self.item.stride % self.unroll:
            raise UserError(
                f"algo.stride={self.item.stride} must be a multiple of algo.unroll={self.unroll}: memory is kept where "
                "unrolls begin"
            )

    @property
    def item(self) -> Item:
        length = self.window - self.burn_in
        return Item(length, length if self.stride is None else self.stride, self.eta, self.stored_state)
