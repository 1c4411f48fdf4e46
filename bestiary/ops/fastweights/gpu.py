"""The Triton kernels as differentiable functions of CUDA tensors."""
# pyright: reportConstantRedefinition=false, reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.ops.fastweights import triton_kernels as kernels
from bestiary.ops.fastweights.loops import PREVIOUS_EPS, FeatureMap, Recurrence

BLOCK = 16  # time steps from one stored memory to the next
TILE_PER_WARP = 512  # memory entries per warp: 16 registers per thread, so that four memories fit


class _Call:
    """Sizes of a call, buffers for its backward pass, and the launch of its kernels."""

    def __init__(self, ctx: Any, x: Tensor, W: Tensor, phi: FeatureMap, bptt: int | None) -> None:
        self.steps, self.batch, self.heads, _ = x.shape
        self.width = W.shape[-1]
        self.needs_grad = any(ctx.needs_input_grad)
        self.phi, self.bptt, self.block = phi, bptt, BLOCK

    def per_step(self, x: Tensor, width: int) -> Tensor:
        return x.new_empty(self.steps, self.batch, self.heads, width)

    def kept(self, x: Tensor, width: int) -> Tensor:
        """A buffer of activations for the backward pass; empty if there is none."""
        return self.per_step(x, width) if self.needs_grad else x.new_empty(0)

    def saved(self, W: Tensor) -> Tensor:
        """A buffer of gradient checkpoints: the memory at the start of each block."""
        return W.new_empty(triton.cdiv(self.steps, self.block) if self.needs_grad else 0, *W.shape)

    def segments(self, reset: Tensor) -> tuple[Tensor, Tensor]:
        """For each step, the first step of its segment and whether the gradient is truncated there: both [T, B]."""
        step = torch.arange(self.steps, device=reset.device, dtype=torch.int32)[:, None]
        begins = torch.where(reset | (step % self.block == 0), step, 0).cummax(0).values
        return begins, reset | (step % self.bptt == 0) if self.bptt else reset

    def run(self, kernel: Any, *tensors: Tensor, **constants: Any) -> None:
        P = triton.next_power_of_2(self.width)
        warps = min(max(P * P // TILE_PER_WARP, 1), 16)
        with torch.cuda.device_of(tensors[0]):
            kernel[(self.batch * self.heads,)](
                *tensors, self.steps, self.heads, D=self.width, P=P, PHI=self.phi, BLOCK=self.block,
                num_warps=warps, **constants,
            )  # fmt: skip


class _OneMemory(torch.autograd.Function):
    """Linear Transformer and Delta Net."""

    @staticmethod
    def forward(
        ctx: Any, delta: bool, x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap, bptt: int | None
    ) -> tuple[Tensor, ...]:
        call = _Call(ctx, x, W, phi, bptt)
        x, reset, W = x.contiguous(), reset.contiguous(), W.contiguous()
        y, W_last = call.per_step(x, call.width), torch.empty_like(W)
        buffers = call.kept(x, call.width), call.kept(x, call.width), call.saved(W)
        kernel = kernels.delta_net_forward if delta else kernels.linear_transformer_forward
        call.run(kernel, x, reset, W, W_last, y, *buffers, LEARNS=call.needs_grad)
        ctx.save_for_backward(x, reset, *buffers)
        ctx.rest = call, delta
        return y, W_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x, reset, *buffers = ctx.saved_tensors
        call, delta = ctx.rest
        dy, dW = (grad.contiguous() for grad in grads)
        dx, dW_first = torch.empty_like(x), torch.empty_like(dW)
        kernel = kernels.delta_net_backward if delta else kernels.linear_transformer_backward
        call.run(kernel, x, *call.segments(reset), *buffers, dy, dW, dx, dW_first)
        return None, dx, None, dW_first, None, None


class _RecurrentDeltaNet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        R_q: Tensor,
        R_k: Tensor,
        R_v: Tensor,
        r_beta: Tensor,
        reset: Tensor,
        W: Tensor,
        y_first: Tensor,
        phi: FeatureMap,
        bptt: int | None,
    ) -> tuple[Tensor, ...]:
        call = _Call(ctx, x, W, phi, bptt)
        x, reset, W, y_first = x.contiguous(), reset.contiguous(), W.contiguous(), y_first.contiguous()
        R = [r.contiguous() for r in (R_q, R_k, R_v, r_beta)]
        y, W_last = call.per_step(x, call.width), torch.empty_like(W)
        key, written, feedback = (call.kept(x, call.width) for _ in range(3))
        x_total, saved = call.kept(x, x.shape[-1]), call.saved(W)
        call.run(
            kernels.recurrent_delta_net_forward, x, *R, reset, W, y_first, W_last, y, key, written, feedback, x_total,
            saved, LEARNS=call.needs_grad,
        )  # fmt: skip
        ctx.save_for_backward(x_total, *R, reset, key, written, feedback, saved)
        ctx.call = call
        return y, W_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x_total, *R, reset, key, written, feedback, saved = ctx.saved_tensors
        call, D = ctx.call, ctx.call.width
        dy, dW = (grad.contiguous() for grad in grads)
        dx, dW_first, dy_first = torch.empty_like(x_total), torch.empty_like(dW), torch.empty_like(dy[0])
        call.run(
            kernels.recurrent_delta_net_backward, x_total, *R, *call.segments(reset), key, written, feedback, saved,
            dy, dW, dx, dW_first, dy_first,
        )  # fmt: skip
        # gradient of the recurrent weights over all time steps at once
        dR_all = torch.einsum("tbhi,tbhj->hij", feedback, dx)  # [H, D, 3D + 1]
        dR = [*dR_all[..., : 3 * D].split(D, -1), dR_all[..., 3 * D]]
        return dx, *dR, None, dW_first, dy_first, None, None


class _DeltaRnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        reset: Tensor,
        W: Tensor,
        R: Tensor,
        y_first: Tensor,
        phi: FeatureMap,
        bptt: int | None,
        eps: float,
    ) -> tuple[Tensor, ...]:
        call = _Call(ctx, x, W, phi, bptt)
        x, reset, W, R, y_first = (a.contiguous() for a in (x, reset, W, R, y_first))
        y, W_last, R_last = call.per_step(x, call.width), torch.empty_like(W), torch.empty_like(R)
        buffers = [call.kept(x, call.width) for _ in range(5)] + [call.saved(W), call.saved(R)]
        call.run(
            kernels.delta_rnn_forward, x, reset, W, R, y_first, W_last, R_last, y, *buffers,
            LEARNS=call.needs_grad, EPS=eps,
        )  # fmt: skip
        ctx.save_for_backward(x, reset, *buffers)
        ctx.call = call
        return y, W_last, R_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x, reset, *buffers = ctx.saved_tensors
        dy, dW, dR = (grad.contiguous() for grad in grads)
        gradients = [torch.empty_like(a) for a in (x, dW, dR, dy[0])]
        ctx.call.run(kernels.delta_rnn_backward, x, *ctx.call.segments(reset), *buffers, dy, dW, dR, *gradients)
        return gradients[0], None, *gradients[1:], None, None, None


def linear_transformer(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    return _OneMemory.apply(False, x, reset, W, phi, bptt)  # type: ignore


def delta_net(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    return _OneMemory.apply(True, x, reset, W, phi, bptt)  # type: ignore


def recurrent_delta_net(
    x: Tensor,
    R: Recurrence,
    reset: Tensor,
    W: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
) -> tuple[Tensor, Tensor]:
    weights = (
        R if torch.is_grad_enabled() else [r.detach() for r in R]
    )  # else the parameters alone would make the forward pass store activations
    return _RecurrentDeltaNet.apply(x, *weights, reset, W, y, phi, bptt)  # type: ignore


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
    return _DeltaRnn.apply(x, reset, W, R, y, phi, bptt, eps)  # type: ignore
