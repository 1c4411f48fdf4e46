"""Policy networks that take features and a command: the command gates or scales the layers."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.nets import orthogonal


class Gate(nn.Module):
    """tanh features times sigmoid gates of the command, then fully connected layers (Srivastava et al. 2019)."""

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.features = nn.Linear(width, hidden[0])
        self.gate = nn.Linear(command, hidden[0])
        widths = [*hidden, outputs]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        for layer, gain in ((self.features, 1.0), (self.gate, 1.0), *((layer, 2**0.5) for layer in self.layers[:-1])):
            orthogonal(layer, gain)

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        x = self.features(x).tanh() * self.gate(command).sigmoid()
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Gates(nn.Module):
    """Every hidden layer is multiplied by sigmoid gates of the command (Kumar et al. 2019)."""

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [width, *hidden]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.gates = nn.ModuleList(nn.Linear(command, o) for o in hidden)
        self.last = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = F.relu(layer(x)) * gate(command).sigmoid()
        return self.last(x)


class Film(nn.Module):
    """The command scales every hidden layer by 0 to 2, as in FiLM (Perez et al. 2018); the first layer sees it too."""

    def __init__(self, width: int, command: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        widths = [width + command, *hidden]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.scales = nn.ModuleList(nn.Linear(command, o) for o in hidden)
        self.last = nn.Linear(widths[-1], outputs)
        with torch.no_grad():  # so that the policy is nearly uniform at first
            self.last.weight.mul_(0.01)
            self.last.bias.zero_()

    def forward(self, x: Tensor, command: Tensor) -> Tensor:
        x = torch.cat([x, command], -1)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = F.relu(layer(x)) * (1 + F.softsign(scale(command)))
        return self.last(x)


NETWORKS: dict[str, Callable[..., nn.Module]] = {"gate": Gate, "gates": Gates, "film": Film}
