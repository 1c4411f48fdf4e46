"""What every memory promises."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from bestiary.errors import UserError
from bestiary.ops.program import Program
from bestiary.types import State

if TYPE_CHECKING:
    pass


class Core(nn.Module):
    """Memory: [T, B, D] -> [T, B, width], forgetting wherever is_first.

    The contract, tested for every core: one chunk = two chunks = row by row, in outputs, states and
    gradients; memory is empty exactly at `is_first`; batch rows do not mix; every parameter is trained.

    Where no gradient is recorded and T is 1, a core may write into the state it is given instead of copying it, as
    long as that state still says what it said. Who keeps a state for longer than one row keeps a copy.
    """

    width: int  # of the output
    _leaves: list[tuple[int, ...]] | None = None

    def initial_state(self, batch_size: int) -> State:
        raise NotImplementedError

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError

    def compile_to(self, program: Program, x: int) -> int | None:
        """This memory as instructions for compiled acting: input at x, where the output is; None: it has none."""
        return None

    def check(self, state: State) -> None:
        """Refuse the memory of another core, or of one of another size."""
        leaves = [tuple(leaf.shape[1:]) for leaf in state]
        if self._leaves is None:
            self._leaves = [tuple(leaf.shape[1:]) for leaf in self.initial_state(1)]
        if leaves != self._leaves:
            raise UserError(f"the state belongs to another memory: its leaves are {leaves}, not {self._leaves}")

    @torch.no_grad()
    def reveal(self, x: Tensor) -> dict[str, Tensor]:
        """What memory holds over an episode [T, 1, D] from its first row: named [T, n] tables, a row per time step.

        A core that can tell more than the size of its memory says so by its own version.
        """
        state, sizes = self.initial_state(1), []
        for row in x:
            _, state = self(row[None], torch.zeros(1, 1, dtype=torch.bool, device=x.device), state)
            sizes.append(torch.stack([leaf.double().norm() for leaf in state]) if state else x.new_zeros(0))
        return {"size of the memory": torch.stack(sizes)} if state else {}


def check_sizes(cfg: object, *names: str) -> None:
    """Refuse a size below one; None means that the core chooses."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise UserError(f"core.{name.replace('_', '-')}={value} must be at least 1")


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"core.dropout={dropout} must lie in [0, 1)")


def check_bptt(bptt: int | None) -> None:
    if bptt is not None and bptt < 1:
        raise UserError(f"core.bptt={bptt} must be at least 1 row, or None for the whole chunk")


class CoreConfig(Protocol):
    """A memory is a frozen dataclass of numbers that builds a Core."""

    def build(self, input_width: int) -> Core: ...
