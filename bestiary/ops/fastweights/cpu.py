"""The compiled CPU kernels as differentiable functions of tensors; the streams are divided among threads."""
# pyright: reportConstantRedefinition=false, reportIncompatibleMethodOverride=false

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.ops.fastweights import kernels
from bestiary.ops.fastweights.loops import PREVIOUS_EPS, FeatureMap, Recurrence

MAPS = {"elu": kernels.ELU, "softmax": kernels.SOFTMAX, "silu": kernels.SILU}
MIN_STEPS_PER_THREAD = 512  # time steps x streams; below, starting another thread costs more than it gains


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fastweights")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _run(kernel: Callable[..., None], steps: int, width: int, streams: int, *args: Any) -> None:
    """Run a kernel on a thread pool. Numba's own threads do not allow two concurrent callers (actor and learner)."""
    arrays = [a.numpy() if isinstance(a, Tensor) else a for a in args]
    arrays.append((0,) * width)
    threads = min(torch.get_num_threads(), steps * streams // MIN_STEPS_PER_THREAD, streams)
    if threads < 2:
        kernel(*arrays, 0, streams)
        return
    edges = [streams * i // threads for i in range(threads + 1)]
    others = [_pool(threads - 1).submit(kernel, *arrays, edges[i], edges[i + 1]) for i in range(1, threads)]
    kernel(*arrays, edges[0], edges[1])
    for other in others:
        other.result()


class _Sizes:
    """Sizes and layouts of a call: tensors are [T, B, H, ...], kernels use [T, N, ...] with N = B * H streams."""

    def __init__(self, ctx: Any, x: Tensor, reset: Tensor, W: Tensor, vectors: int, strengths: int) -> None:
        """`vectors`: number of concatenated vectors of width D in x; `strengths`: number of scalars after them."""
        self.steps, self.batch, self.heads, columns = x.shape
        self.width = W.shape[-1]
        # compiled code does not check bounds
        assert self.steps and columns == vectors * self.width + strengths and reset.shape == x.shape[:2]
        assert W.shape == (self.batch, self.heads, self.width, self.width)
        self.streams = self.batch * self.heads
        self.needs_grad = any(ctx.needs_input_grad)

    def to_streams(self, x: Tensor) -> Tensor:
        return x.detach().reshape(self.steps, self.streams, -1).contiguous()

    def read_only(self, m: Tensor) -> Tensor:
        """[B, H, ...] -> [N, ...]; the kernel must not write to it."""
        return m.detach().flatten(0, 1).contiguous()

    def writable(self, m: Tensor) -> Tensor:
        """[B, H, ...] -> [N, ...]: a copy that the kernel may write to."""
        return m.detach().flatten(0, 1).clone(memory_format=torch.contiguous_format)

    def from_streams(self, x: Tensor) -> Tensor:
        return x.view(self.steps, self.batch, self.heads, -1)

    def as_memory(self, m: Tensor) -> Tensor:
        return m.view(self.batch, self.heads, *m.shape[1:])

    def kept(self, x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
        """Buffers of the activations for the backward pass; of a single time step if there is none."""
        steps = self.steps if self.needs_grad else 1
        return x.new_empty(self.streams, steps, parts, self.width), x.new_empty(self.streams, steps)

    def saved(self, W: Tensor) -> Tensor:
        """Buffer of the gradient checkpoints: the memory at the start of each block."""
        blocks = -(-self.steps // kernels.BLOCK) if self.needs_grad else 0
        return W.new_empty(blocks, *W.shape)

    def run(self, kernel: Callable[..., None], *args: Any) -> None:
        _run(kernel, self.steps, self.width, self.streams, *args)


class _OneMemory(torch.autograd.Function):
    """Linear Transformer and Delta Net."""

    @staticmethod
    def forward(ctx: Any, delta: bool, x: Tensor, reset: Tensor, W: Tensor, phi: int, bptt: int) -> tuple[Tensor, ...]:
        sizes = _Sizes(ctx, x, reset, W, 3, int(delta))
        x, W0, reset = sizes.to_streams(x), sizes.read_only(W), reset.contiguous()
        W = torch.empty_like(W0)
        y = x.new_empty(sizes.steps, sizes.streams, sizes.width)
        kept, strength, saved = *sizes.kept(x, parts=3), sizes.saved(W)
        kernel = kernels.delta_net_forward if delta else kernels.linear_transformer_forward
        sizes.run(kernel, x, reset, sizes.heads, phi, W0, W, y, kept, strength, saved)
        ctx.save_for_backward(x, reset, kept, strength, saved)
        ctx.rest = sizes, delta, phi, bptt
        return sizes.from_streams(y), sizes.as_memory(W)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, reset, kept, strength, saved = ctx.saved_tensors
        sizes, delta, phi, bptt = ctx.rest
        g, G, dx = sizes.to_streams(grads[0]), sizes.writable(grads[1]), torch.empty_like(x)
        kernel = kernels.delta_net_backward if delta else kernels.linear_transformer_backward
        sizes.run(kernel, x, reset, sizes.heads, phi, bptt, kept, strength, saved, g, G, dx)
        return None, sizes.from_streams(dx), None, sizes.as_memory(G), None, None


class _RecurrentDeltaNet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        Rq: Tensor,
        Rk: Tensor,
        Rv: Tensor,
        rb: Tensor,
        reset: Tensor,
        W: Tensor,
        y_last: Tensor,
        phi: int,
        bptt: int,
    ) -> tuple[Tensor, ...]:
        sizes = _Sizes(ctx, x, reset, W, 3, 1)
        x, W0, y_last, reset = sizes.to_streams(x), sizes.read_only(W), sizes.read_only(y_last), reset.contiguous()
        W = torch.empty_like(W0)
        R = [r.detach().contiguous() for r in (Rq, Rk, Rv, rb)]
        y = x.new_empty(sizes.steps, sizes.streams, sizes.width)
        parts = 4 if phi == kernels.SOFTMAX else 6
        kept, strength, saved = *sizes.kept(x, parts), sizes.saved(W)
        sizes.run(
            kernels.recurrent_delta_net_forward, x, *R, reset, sizes.heads, phi, W0, W, y_last, y, kept, strength, saved
        )
        ctx.save_for_backward(*R, reset, kept, strength, saved)
        ctx.rest = sizes, phi, bptt
        return sizes.from_streams(y), sizes.as_memory(W)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        Rq, Rk, Rv, rb, reset, kept, strength, saved = ctx.saved_tensors
        sizes, phi, bptt = ctx.rest
        D = sizes.width
        g, G, dy = sizes.to_streams(grads[0]), sizes.writable(grads[1]), grads[0].new_empty(sizes.streams, D)
        dx = g.new_empty(sizes.steps, sizes.streams, 3 * D + 1)
        transposed = [r.transpose(1, 2).contiguous() for r in (Rq, Rk, Rv)]
        sizes.run(
            kernels.recurrent_delta_net_backward, *transposed, rb, reset, sizes.heads, phi, bptt,
            kept, strength, saved, g, G, dy, dx,
        )  # fmt: skip
        # gradient of the recurrent weights over all time steps at once: [H, D, B * T] times [H, B * T, 3D + 1]
        feedback = (
            kept[:, :, kernels.FEEDBACK].view(sizes.batch, sizes.heads, sizes.steps, D).permute(1, 3, 0, 2).flatten(2)
        )
        dR = feedback @ sizes.from_streams(dx).permute(2, 1, 0, 3).flatten(1, 2)
        dR = [*dR[..., : 3 * D].chunk(3, -1), dR[..., 3 * D]]
        return sizes.from_streams(dx), *dR, None, sizes.as_memory(G), sizes.as_memory(dy), None, None


class _DeltaRnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        reset: Tensor,
        W: Tensor,
        R: Tensor,
        y_last: Tensor,
        phi: int,
        bptt: int,
        eps: float,
    ) -> tuple[Tensor, ...]:
        sizes = _Sizes(ctx, x, reset, W, 5, 2)
        x, W0, R0, y_last = sizes.to_streams(x), sizes.read_only(W), sizes.read_only(R), sizes.read_only(y_last)
        reset = reset.contiguous()
        W, R = torch.empty_like(W0), torch.empty_like(R0)
        y = x.new_empty(sizes.steps, sizes.streams, sizes.width)
        kept, strength = sizes.kept(x, parts=6)
        buffers = kept, strength, torch.empty_like(strength), sizes.saved(W), sizes.saved(R)
        sizes.run(kernels.delta_rnn_forward, x, reset, sizes.heads, phi, eps, W0, W, R0, R, y_last, y, *buffers)
        ctx.save_for_backward(x, reset, *buffers)
        ctx.rest = sizes, phi, bptt
        return sizes.from_streams(y), sizes.as_memory(W), sizes.as_memory(R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, reset, *buffers = ctx.saved_tensors
        sizes, phi, bptt = ctx.rest
        g, G, G_2, dx = (
            sizes.to_streams(grads[0]),
            sizes.writable(grads[1]),
            sizes.writable(grads[2]),
            torch.empty_like(x),
        )
        dy = g.new_empty(sizes.streams, sizes.width)
        sizes.run(kernels.delta_rnn_backward, x, reset, sizes.heads, phi, bptt, *buffers, g, G, G_2, dy, dx)
        memories = (sizes.as_memory(m) for m in (G, G_2, dy))
        return sizes.from_streams(dx), None, *memories, None, None, None


def _apply(rule: type[torch.autograd.Function], *args: Any) -> Any:
    """Without gradient mode nothing is stored for a backward pass, even if the weights require gradients."""
    if not torch.is_grad_enabled():
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    return rule.apply(*args)  # type: ignore


def linear_transformer(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    return _apply(_OneMemory, False, x, reset, W, MAPS[phi], bptt or 0)


def delta_net(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    return _apply(_OneMemory, True, x, reset, W, MAPS[phi], bptt or 0)


def recurrent_delta_net(
    x: Tensor,
    R: Recurrence,
    reset: Tensor,
    W: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
) -> tuple[Tensor, Tensor]:
    return _apply(_RecurrentDeltaNet, x, *R, reset, W, y, MAPS[phi], bptt or 0)


def delta_rnn(
    x: Tensor,
    reset: Tensor,
    W: Tensor,
    R: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
    eps: float = PREVIOUS_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    return _apply(_DeltaRnn, x, reset, W, R, y, MAPS[phi], bptt or 0, eps)
