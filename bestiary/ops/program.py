"""Compiled acting: a small network as a list of instructions that `ops.interpreter` runs without PyTorch.

An acting step in PyTorch is a few dozen calls, each of which costs more than the arithmetic of a small network. A
Program is the same network as instructions with addresses: where to read, where to write, which weights. A module
appends its instructions in `compile_to(program, x) -> address of the result`. A module that has none returns None;
then the actor uses PyTorch.

Inputs and activations of one environment lie in one array, `scratch`; the recurrent state is one array per
environment, its leaves concatenated; the weights are one array, which is filled again whenever they change.
"""
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bestiary.ops.fastweights.loops import RULES
from bestiary.types import Spec, State

LINEAR, CONVOLUTION, NORM, ADD, COPY, LSTM, GRU, FAST_WEIGHTS = range(8)
LINEAR_TRANSFORMER, DELTA_NET, RECURRENT_DELTA_NET, DELTA_RNN = range(len(RULES))
PHI = {"elu": 0, "softmax": 1, "silu": 2}
INSTRUCTION_WIDTH = 12  # integers per instruction, the opcode included


class Program:
    """Instructions and sizes of the arrays. `scratch` starts with observation, reward and one-hot previous action."""

    def __init__(self, spec: Spec) -> None:
        self.code: list[tuple[int, ...]] = []
        self.sources: list[Callable[[], Tensor]] = []
        self.weight_count = self.scratch_size = self.memory_size = 0
        self.obs, self.reward, self.action = (self.alloc(n) for n in (math.prod(spec.obs_shape), 1, spec.num_actions))

    # -- compiling -----------------------------------------------------------------------------------

    def alloc(self, size: int) -> int:
        """Reserve `size` numbers of scratch; returns their address."""
        self.scratch_size += size
        return self.scratch_size - size

    def weights(self, *sources: Callable[[], Tensor]) -> int:
        """Reserve space for these tensors, one after the other; `load_weights` calls the sources again each time."""
        start = self.weight_count
        self.sources += sources
        self.weight_count += sum(source().numel() for source in sources)
        return start

    def memory(self, size: int) -> int:
        """Reserve recurrent state, which lasts from step to step, in the order of the leaves of the core's state."""
        self.memory_size += size
        return self.memory_size - size

    def emit(self, *words: int) -> None:
        self.code.append(words + (0,) * (INSTRUCTION_WIDTH - len(words)))

    def linear(self, layer: nn.Linear, x: int, relu: bool = False, channels: int | None = None) -> int:
        """`channels`: the number of channels if x is an image with channels last; the layer expects channels first."""
        y = self.alloc(layer.out_features)
        w = self.weights(lambda: layer.weight.t().view(channels or 1, -1, layer.out_features).transpose(0, 1))
        b = -1 if layer.bias is None else self.weights(lambda: layer.bias)  # type: ignore
        self.emit(LINEAR, y, x, layer.in_features, layer.out_features, w, b, relu)
        return y

    def layers(self, layers: nn.Sequential, x: int) -> int:
        """Linear layers with ReLU between them."""
        *inner, last = (layer for layer in layers if isinstance(layer, nn.Linear))
        for layer in inner:
            x = self.linear(layer, x, relu=True)
        return self.linear(last, x)

    def matrix(self, source: Callable[[], Tensor], x: int) -> int:
        """A product with a constant matrix [outputs, inputs] that is not a layer."""
        outputs, inputs = source().shape
        y, w = self.alloc(outputs), self.weights(lambda: source().t())
        self.emit(LINEAR, y, x, inputs, outputs, w, -1, False)
        return y

    def convolution(self, layer: nn.Conv2d, x: int, height: int, width: int, channels_last: bool) -> int:
        """A convolution of stride 1 without padding, then ReLU; the result has its channels last."""
        k, channels = layer.kernel_size[0], layer.in_channels
        y = self.alloc((height - k + 1) * (width - k + 1) * layer.out_channels)
        w = self.weights(lambda: layer.weight.permute(2, 3, 1, 0), lambda: layer.bias)  # type: ignore
        strides = (
            (1, channels) if channels_last else (height * width, 1)
        )  # address steps between channels and between pixels
        self.emit(CONVOLUTION, y, x, channels, height, width, layer.out_channels, k, w, *strides)
        return y

    def copy(self, x: int, n: int, to: int) -> None:
        self.emit(COPY, to, x, n)

    def norm(self, layer: nn.LayerNorm, x: int) -> int:
        n = layer.weight.numel()
        y = self.alloc(n)
        self.emit(NORM, y, x, n, self.weights(lambda: layer.weight, lambda: layer.bias))
        return y

    def add(self, y: int, x: int, n: int) -> None:
        self.emit(ADD, y, x, n)

    # -- running -------------------------------------------------------------------------------------

    def instructions(self) -> NDArray[np.int64]:
        return np.array(self.code, np.int64).reshape(-1, INSTRUCTION_WIDTH)

    def load_weights(self) -> NDArray[np.float32]:
        parts = [source().detach().to("cpu", torch.float32).reshape(-1) for source in self.sources]
        return torch.cat(parts).numpy() if parts else np.zeros(0, np.float32)


def flatten_state(state: State, batch_size: int) -> NDArray[np.float32]:
    """A recurrent state as an array [B, numbers]."""
    if not state:
        return np.zeros((batch_size, 0), np.float32)
    return torch.cat([leaf.reshape(batch_size, -1) for leaf in state], 1).numpy().copy()


def unflatten_state(memory: NDArray[np.float32], like: State) -> State:
    """The inverse of `flatten_state`, with the shapes of `like`."""
    parts = torch.from_numpy(memory.copy()).split_with_sizes([leaf[0].numel() for leaf in like], 1)
    return tuple(part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True))
