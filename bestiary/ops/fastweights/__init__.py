"""The four fast-weight rules (fast weight programmers, Schmidhuber 1992), each as a plain loop and in faster forms.

The functions here choose the fastest form for the device of the tensors: Numba kernels on the CPU, Triton kernels on
CUDA, else matrix products over chunks of time steps (Linear Transformer and Delta Net), else the plain loop.
"""

import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from bestiary.ops.fastweights import chunked, loops
from bestiary.ops.fastweights.loops import FeatureMap, Recurrence

MAX_KERNEL_WIDTH = 128  # kernels hold vectors of the head width in registers: wider heads are faster as products


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def form(rule: str, x: Tensor, width: int) -> ModuleType:
    """The module whose function `rule` is the fastest for heads of this width on the device of x."""
    if x.dtype not in (torch.float32, torch.float64):
        return loops
    if x.device.type == "cpu" and width <= MAX_KERNEL_WIDTH:
        from bestiary.ops.fastweights import cpu

        return cpu
    if x.is_cuda and width <= MAX_KERNEL_WIDTH and _has_triton():
        from bestiary.ops.fastweights import gpu

        return gpu
    return chunked if hasattr(chunked, rule) else loops


def linear_transformer(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    return form("linear_transformer", x, W.shape[-1]).linear_transformer(x, reset, W, phi, bptt)


def delta_net(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    return form("delta_net", x, W.shape[-1]).delta_net(x, reset, W, phi, bptt)


def recurrent_delta_net(
    x: Tensor,
    R: Recurrence,
    reset: Tensor,
    W: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
) -> tuple[Tensor, Tensor]:
    return form("recurrent_delta_net", x, W.shape[-1]).recurrent_delta_net(x, R, reset, W, y, phi, bptt)


def delta_rnn(
    x: Tensor,
    reset: Tensor,
    W: Tensor,
    R: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return form("delta_rnn", x, W.shape[-1]).delta_rnn(x, reset, W, R, y, phi, bptt)
