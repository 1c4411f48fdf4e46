"""A core of your own: leaky integrator units, each with a learnt decay rate.

bestiary doctor core examples/leaky_core.py:Leaky
bestiary train recall --plugin examples/leaky_core.py core:leaky --core.hidden 64
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import bestiary
from bestiary.cores.base import Core
from bestiary.errors import UserError
from bestiary.types import State


class LeakyCore(Core):
    """h_t = k * h_{t-1} + (1 - k) * W x_t with a learnt k in (0, 1) per unit; the output is tanh(h_t)."""

    def __init__(self, cfg: "Leaky", input_width: int) -> None:
        super().__init__()
        self.width = cfg.hidden  # of the output
        self.write = nn.Linear(input_width, cfg.hidden)
        self.keep = nn.Parameter(torch.linspace(-2, 4, cfg.hidden))  # logits of k

    def initial_state(self, batch_size: int) -> State:
        return (self.keep.new_zeros(batch_size, self.width),)  # axis 0 of every tensor of a state is the batch

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        keep = self.keep.sigmoid()
        new = (1 - keep) * self.write(x)  # [T, B, H]
        (h,) = state
        outputs = []
        for new_t, first_t in zip(new, is_first, strict=True):
            h = torch.where(first_t[:, None], 0, h)  # clear the state where an episode starts
            h = keep * h + new_t
            outputs.append(h)
        return torch.stack(outputs).tanh(), (h,)


@dataclass(frozen=True)
class Leaky:
    """Leaky integrators: exponential moving averages of the input, with a learnt decay rate per unit."""

    hidden: int = 64
    """number of units, and width of the output"""

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise UserError(f"core.hidden={self.hidden} must be at least 1")

    def build(self, input_width: int) -> Core:
        return LeakyCore(self, input_width)


bestiary.register(core=Leaky)
