"""Memory behind gates: keep, write and show are learnt per unit."""

from dataclasses import dataclass

import torch
from torch import nn

from bestiary.cores.base import Core
from bestiary.cores.rnn import Gated, GatedCore


@dataclass(frozen=True)
class Lstm(Gated):
    """Long short-term memory: a cell per unit that gates fill, keep and show."""

    def build(self, input_width: int) -> Core:
        core = GatedCore(nn.LSTM(input_width, self.hidden or input_width, self.layers), 2, self.bptt)
        if self.init == "orthogonal":
            core.orthogonal()
        if self.chrono is not None:
            with torch.no_grad():
                for from_input, from_itself in core.biases():
                    from_itself.zero_()
                    from_input.zero_()
                    write, keep, _, _ = from_input.chunk(4)  # input, forget, cell, output
                    keep.copy_(core.time_constants(self.chrono))
                    write.copy_(-keep)
        return core
