"""Output heads and weight initialisation."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from bestiary.ops.program import Program


@torch.no_grad()
def orthogonal(module: nn.Module, gain: float) -> None:
    """Initialise every convolution and linear layer of a module: orthogonal weights (Saxe et al. 2014), zero biases."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # nn.init.orthogonal_ does not support the channels_last layout, so it fills a contiguous tensor first
            layer.weight.copy_(nn.init.orthogonal_(torch.empty(layer.weight.shape), gain))
            if layer.bias is not None:
                layer.bias.zero_()


def head(width: int, hidden: Sequence[int], outputs: int, last: float, init: str) -> nn.Sequential:
    """A multilayer perceptron with ReLU. The output layer starts uniform in [-last, last], so all outputs are near 0.

    With init="orthogonal" the hidden layers are orthogonal with gain sqrt(2). Otherwise they start as in the reference
    code of Ni et al. (2023): weights uniform within 1 / sqrt(outputs of the layer), biases 0.1.
    """
    widths = [width, *hidden, outputs]
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    for layer in layers[:-1]:
        if init == "orthogonal":
            orthogonal(layer, gain=2**0.5)
        else:
            bound = layer.out_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.constant_(layer.bias, 0.1)
    nn.init.uniform_(layers[-1].weight, -last, last)
    nn.init.uniform_(layers[-1].bias, -last, last)
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])


class Dueling(nn.Module):
    """Dueling heads: Q(s, a) = V(s) + A(s, a) - mean over legal actions of A(s, .) (Wang et al. 2016)."""

    mix: Tensor

    def __init__(self, width: int, hidden: Sequence[int], legal: Tensor, init: str) -> None:
        super().__init__()
        self.value = head(width, hidden, 1, last=3e-3, init=init)
        self.advantage = head(width, hidden, len(legal), last=3e-3, init=init)
        mean = legal / legal.sum()
        mix = torch.cat([torch.ones(len(legal), 1), torch.eye(len(legal)) - mean], 1)  # Q = mix [V, A]
        self.register_buffer("mix", mix, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(torch.cat([self.value(h), self.advantage(h)], -1), self.mix)

    def compile_to(self, program: "Program", x: int) -> int:
        """Append the instructions of both heads to a program; returns the address of Q."""
        value, advantage = program.layers(self.value, x), program.layers(self.advantage, x)
        both = program.alloc(1 + len(self.mix))
        program.copy(value, 1, both)
        program.copy(advantage, len(self.mix), both + 1)
        return program.matrix(lambda: self.mix, both)
