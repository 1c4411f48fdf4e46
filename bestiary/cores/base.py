"""The core contract: the interface and the guarantees of every recurrent core."""

from typing import Protocol

import torch
from torch import Tensor, nn

from bestiary.errors import UserError
from bestiary.ops.program import Program
from bestiary.types import State


class Core(nn.Module):
    """A recurrent network [T, B, D] -> [T, B, width] whose state is reset wherever is_first.

    The core contract, tested for every core: a chunk processed at once, in pieces or step by step gives the same
    outputs, states and gradients; the state is empty exactly at `is_first`; batch entries are independent; every
    parameter gets a gradient.

    Without gradients and with T = 1, a core may write into the given state instead of copying it, if the outputs that
    follow from this state do not change. A caller that keeps a state for longer than one step keeps a copy.
    """

    width: int  # output features
    _leaves: list[tuple[int, ...]] | None = None  # shapes of the state's leaves without the batch

    def initial_state(self, batch_size: int) -> State:
        raise NotImplementedError

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        raise NotImplementedError

    def compile_to(self, program: Program, x: int) -> int | None:
        """Append this core's instructions for compiled acting (input at address x); returns the output's address.

        None: this core has no instructions, and the actor uses PyTorch.
        """
        return None

    def check(self, state: State) -> None:
        """Raise UserError for the state of another core or of a core of another size."""
        leaves = [tuple(leaf.shape[1:]) for leaf in state]
        if self._leaves is None:
            self._leaves = [tuple(leaf.shape[1:]) for leaf in self.initial_state(1)]
        if leaves != self._leaves:
            raise UserError(f"the recurrent state has leaves {leaves}, but this core needs {self._leaves}")

    @torch.no_grad()
    def diagnostics(self, x: Tensor) -> dict[str, Tensor]:
        """The state during an episode [T, 1, D], from its first step: named tables [T, n] for `bestiary inspect`.

        The default is the norm of the state; cores override this method with gates, attention or write strengths.
        """
        state, norms = self.initial_state(1), []
        for step in x:
            _, state = self(step[None], torch.zeros(1, 1, dtype=torch.bool, device=x.device), state)
            norms.append(torch.stack([leaf.double().norm() for leaf in state]) if state else x.new_zeros(0))
        return {"norm of the state": torch.stack(norms)} if state else {}


def check_sizes(cfg: object, *names: str) -> None:
    """Raise UserError for a size below 1; None (the core chooses) is accepted."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise UserError(f"core.{name.replace('_', '-')}={value} must be at least 1")


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"core.dropout={dropout} must lie in [0, 1)")


def check_bptt(bptt: int | None) -> None:
    if bptt is not None and bptt < 1:
        raise UserError(f"core.bptt={bptt} must be at least 1 step, or None for the whole chunk")


class CoreConfig(Protocol):
    """Settings of a core: a frozen dataclass that builds it."""

    def build(self, input_width: int) -> Core: ...
