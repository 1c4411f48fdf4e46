"""Small networks as a list of instructions, run row by row in compiled code.

An ordinary step of acting is a few dozen calls into PyTorch, each of which costs more than the arithmetic of a small
network. A tape is the same network written down once: where to read, where to write, which weights. Modules write
themselves (`to_tape(tape, x) -> where the result is`); one that cannot returns None, and acting stays with PyTorch.

Everything a row needs lies in one array of numbers, `desk`; memory is one array per environment, its leaves side by
side; weights are one array, filled anew whenever they change.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bestiary.ops.fastweights.loops import RULES
from bestiary.types import Spec, State

LINEAR, CONVOLUTION, NORM, ADD, COPY, LSTM, GRU, FAST = range(8)
LINEAR_TRANSFORMER, DELTA_NET, RECURRENT_DELTA_NET, DELTA_RNN = range(len(RULES))
PHI = {"elu": 0, "softmax": 1, "silu": 2}
WORDS = 12  # numbers per instruction


class Program:
    """What a row shows lies at the start of the desk: the observation, the reward, the previous action one-hot."""

    def __init__(self, spec: Spec) -> None:
        self.code: list[tuple[int, ...]] = []
        self.sources: list[Callable[[], Tensor]] = []
        self.weight_count = self.scratch_size = self.memory_size = 0
        self.obs, self.reward, self.action = (self.alloc(n) for n in (math.prod(spec.obs_shape), 1, spec.num_actions))

    # -- writing -------------------------------------------------------------------------------------

    def alloc(self, size: int) -> int:
        """Fresh space on the desk."""
        self.scratch_size += size
        return self.scratch_size - size

    def weights(self, *sources: Callable[[], Tensor]) -> int:
        """Where these tensors will lie, one after the other; they are asked for again at every `load`."""
        start = self.weight_count
        self.sources += sources
        self.weight_count += sum(source().numel() for source in sources)
        return start

    def memory(self, size: int) -> int:
        """Space that lasts from row to row; in the order of the leaves of the core's state."""
        self.memory_size += size
        return self.memory_size - size

    def instruct(self, *words: int) -> None:
        self.code.append(words + (0,) * (WORDS - len(words)))

    def linear(self, layer: nn.Linear, x: int, relu: bool = False, channels: int | None = None) -> int:
        """`channels`: of a picture x whose channels lie last, where the layer was made for channels first."""
        y = self.alloc(layer.out_features)
        w = self.weights(lambda: layer.weight.t().unflatten(0, (channels or 1, -1)).transpose(0, 1))
        b = -1 if layer.bias is None else self.weights(lambda: layer.bias)
        self.instruct(LINEAR, y, x, layer.in_features, layer.out_features, w, b, relu)
        return y

    def layers(self, layers: nn.Sequential, x: int) -> int:
        """Linear layers with ReLU between them."""
        *inner, last = (layer for layer in layers if isinstance(layer, nn.Linear))
        for layer in inner:
            x = self.linear(layer, x, relu=True)
        return self.linear(last, x)

    def matrix(self, source: Callable[[], Tensor], x: int) -> int:
        """A product with numbers that are not a layer's: [outputs, inputs]."""
        outputs, inputs = source().shape
        y, w = self.alloc(outputs), self.weights(lambda: source().t())
        self.instruct(LINEAR, y, x, inputs, outputs, w, -1, False)
        return y

    def convolution(self, layer: nn.Conv2d, x: int, height: int, width: int, channels_last: bool) -> int:
        """With ReLU and a stride of 1; what comes out has its channels last."""
        k, channels = layer.kernel_size[0], layer.in_channels
        y = self.alloc((height - k + 1) * (width - k + 1) * layer.out_channels)
        w = self.weights(lambda: layer.weight.permute(2, 3, 1, 0), lambda: layer.bias)  # type: ignore
        strides = (1, channels) if channels_last else (height * width, 1)  # from channel to channel, pixel to pixel
        self.instruct(CONVOLUTION, y, x, channels, height, width, layer.out_channels, k, w, *strides)
        return y

    def copy(self, x: int, n: int, to: int) -> None:
        self.instruct(COPY, to, x, n)

    def norm(self, layer: nn.LayerNorm, x: int) -> int:
        n = layer.weight.numel()
        y = self.alloc(n)
        self.instruct(NORM, y, x, n, self.weights(lambda: layer.weight, lambda: layer.bias))
        return y

    def add(self, y: int, x: int, n: int) -> None:
        self.instruct(ADD, y, x, n)

    # -- running -------------------------------------------------------------------------------------

    def finish(self) -> NDArray[np.int64]:
        return np.array(self.code, np.int64).reshape(-1, WORDS)

    def load(self) -> NDArray[np.float32]:
        parts = [source().detach().to("cpu", torch.float32).reshape(-1) for source in self.sources]
        return torch.cat(parts).numpy() if parts else np.zeros(0, np.float32)


def flatten(state: State, batch_size: int) -> NDArray[np.float32]:
    """Memory as [B, numbers]."""
    if not state:
        return np.zeros((batch_size, 0), np.float32)
    return torch.cat([leaf.reshape(batch_size, -1) for leaf in state], 1).numpy().copy()


def unflatten(memory: NDArray[np.float32], like: State) -> State:
    parts = torch.from_numpy(memory.copy()).split([leaf[0].numel() for leaf in like], 1)
    return tuple(part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True))
