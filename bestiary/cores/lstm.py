"""Long short-term memory (Hochreiter & Schmidhuber 1997; forget gate: Gers, Schmidhuber & Cummins 2000).

i, f, o = sigmoid(W x + U h + b),    g = tanh(W x + U h + b),    c <- f c + i g,    h <- o tanh(c)
"""

from dataclasses import dataclass

import torch
from torch import nn

from bestiary.cores.base import Core
from bestiary.cores.rnn import GatedConfig, GatedCore


@dataclass(frozen=True)
class Lstm(GatedConfig):
    """LSTM (Hochreiter & Schmidhuber 1997), with input, forget and output gates."""

    def build(self, input_width: int) -> Core:
        core = GatedCore(nn.LSTM(input_width, self.hidden or input_width, self.layers), 2, self.bptt)
        if self.init == "orthogonal":
            core.init_orthogonal()
        if self.chrono is not None:
            with torch.no_grad():
                for bias_ih, bias_hh in core.biases():
                    bias_hh.zero_()
                    bias_ih.zero_()
                    input_gate, forget_gate, _, _ = bias_ih.chunk(4)  # input, forget, cell, output
                    forget_gate.copy_(core.chrono_bias(self.chrono))
                    input_gate.copy_(-forget_gate)
        return core
