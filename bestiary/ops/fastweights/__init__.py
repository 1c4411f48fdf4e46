"""Four ways to program a small network's weights while it runs, each in a plain form and in fast ones.

The functions here choose the fastest form for where the tensors are: compiled kernels on the CPU, Triton kernels on
CUDA, otherwise matrix products over chunks of rows where the rule allows it, and the plain loop where it does not.
"""

import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from bestiary.ops.fastweights import chunked, loops
from bestiary.ops.fastweights.loops import FeatureMap, Recurrence

WIDEST_ROW = 128  # a kernel holds rows in registers: wider heads are faster as matrix products


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def form(rule: str, x: Tensor, width: int) -> ModuleType:
    """The module whose `rule` is the fastest for heads of this width, where x is."""
    if x.dtype not in (torch.float32, torch.float64):
        return loops
    if x.device.type == "cpu" and width <= WIDEST_ROW:
        from bestiary.ops.fastweights import cpu

        return cpu
    if x.is_cuda and width <= WIDEST_ROW and _has_triton():
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
