"""LSTM (Hochreiter & Schmidhuber 1997) and GRU (Cho et al. 2014) over a chunk in which episodes may start anywhere.

PyTorch's fused CPU call has no resets, and its packed sequences take a slow path on the CPU. Here a time step is one
product with the recurrent weights and one compiled pass over the gates. A reset costs nothing, and the gradient of the
weights is a single product at the end.
"""
# pyright: standard, reportCallIssue=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.ops.jit import compiler
from bestiary.ops.simd import broadcast, load, sigmoid, store, tanh, zeros

compiled = compiler(error_model="numpy")


@compiled
def _lstm_step(t, gates, reset, h, c, y, lanes):
    """Apply the gate functions to gates[t] [B, 4H] in place. h, c [T + 1, B, H]: the state before each step."""
    T, B, H = y.shape
    for b in range(B):
        carried = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            i, f = sigmoid(load(gates, (t, b, j), lanes)), sigmoid(load(gates, (t, b, H + j), lanes))
            g, o = tanh(load(gates, (t, b, 2 * H + j), lanes)), sigmoid(load(gates, (t, b, 3 * H + j), lanes))
            cell = f * load(c, (t, b, j), lanes) + i * g
            h_t = o * tanh(cell)
            store(gates, (t, b, j), lanes, i)
            store(gates, (t, b, H + j), lanes, f)
            store(gates, (t, b, 2 * H + j), lanes, g)
            store(gates, (t, b, 3 * H + j), lanes, o)
            store(y, (t, b, j), lanes, h_t)
            store(h, (t + 1, b, j), lanes, h_t if carried else zeros(y, lanes))
            store(c, (t + 1, b, j), lanes, cell if carried else zeros(y, lanes))


@compiled
def _lstm_step_backward(t, gates, reset, c, g_y, dh, dc, d_gates, lanes):
    """d_gates[t]: gradient before the gate functions. dh, dc [B, H]: of the state after step t, then before it."""
    T, B, H = g_y.shape
    for b in range(B):
        carried = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            one = broadcast(1, zeros(g_y, lanes))
            i, f = load(gates, (t, b, j), lanes), load(gates, (t, b, H + j), lanes)
            g, o = load(gates, (t, b, 2 * H + j), lanes), load(gates, (t, b, 3 * H + j), lanes)
            before = load(c, (t, b, j), lanes)
            h_t = tanh(f * before + i * g)
            grad, cell = load(g_y, (t, b, j), lanes), zeros(g_y, lanes)
            if carried:
                grad, cell = grad + load(dh, (b, j), lanes), load(dc, (b, j), lanes)
            cell = cell + grad * o * (one - h_t * h_t)
            store(d_gates, (t, b, j), lanes, cell * g * i * (one - i))
            store(d_gates, (t, b, H + j), lanes, cell * before * f * (one - f))
            store(d_gates, (t, b, 2 * H + j), lanes, cell * i * (one - g * g))
            store(d_gates, (t, b, 3 * H + j), lanes, grad * h_t * o * (one - o))
            store(dc, (b, j), lanes, cell * f)


@compiled
def _gru_step(t, gates, recurrent, reset, h, y, lanes):
    """gates[t] [B, 3H] (from the input) and recurrent[t] (from h) become reset, update and new in gates[t]."""
    T, B, H = y.shape
    for b in range(B):
        carried = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            one = broadcast(1, zeros(y, lanes))
            r = sigmoid(load(gates, (t, b, j), lanes) + load(recurrent, (t, b, j), lanes))
            z = sigmoid(load(gates, (t, b, H + j), lanes) + load(recurrent, (t, b, H + j), lanes))
            n = tanh(load(gates, (t, b, 2 * H + j), lanes) + r * load(recurrent, (t, b, 2 * H + j), lanes))
            h_t = (one - z) * n + z * load(h, (t, b, j), lanes)
            store(gates, (t, b, j), lanes, r)
            store(gates, (t, b, H + j), lanes, z)
            store(gates, (t, b, 2 * H + j), lanes, n)
            store(y, (t, b, j), lanes, h_t)
            store(h, (t + 1, b, j), lanes, h_t if carried else zeros(y, lanes))


@compiled
def _gru_step_backward(t, gates, recurrent, reset, h, g_y, dh, direct, d_gates, d_recurrent, lanes):
    """d_gates[t], d_recurrent[t]: gradients before the gate functions; direct [B, H]: that of h through z h."""
    T, B, H = g_y.shape
    for b in range(B):
        carried = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            one = broadcast(1, zeros(g_y, lanes))
            r, z = load(gates, (t, b, j), lanes), load(gates, (t, b, H + j), lanes)
            n, recurrent_n = load(gates, (t, b, 2 * H + j), lanes), load(recurrent, (t, b, 2 * H + j), lanes)
            grad = load(g_y, (t, b, j), lanes)
            if carried:
                grad = grad + load(dh, (b, j), lanes)
            d_n = grad * (one - z) * (one - n * n)
            d_z = grad * (load(h, (t, b, j), lanes) - n) * z * (one - z)
            d_r = d_n * recurrent_n * r * (one - r)
            store(d_gates, (t, b, j), lanes, d_r)
            store(d_gates, (t, b, H + j), lanes, d_z)
            store(d_gates, (t, b, 2 * H + j), lanes, d_n)
            store(d_recurrent, (t, b, j), lanes, d_r)
            store(d_recurrent, (t, b, H + j), lanes, d_z)
            store(d_recurrent, (t, b, 2 * H + j), lanes, d_n * r)
            store(direct, (b, j), lanes, grad * z)


def _lanes(width: int) -> tuple[int, ...]:
    return (0,) * next(n for n in (16, 8, 4, 2, 1) if width % n == 0)


def _states_before(first: Tensor, reset: Tensor) -> Tensor:
    """States before each step [T + 1, B, H]; only entry 0 is filled."""
    h = first.new_empty(len(reset) + 1, *first.shape)
    h[0] = torch.where(reset[0][:, None], 0, first)
    return h


def _input_gates(x: Tensor, W: Tensor, bias: Tensor) -> Tensor:
    """W x + bias: [T, B, gates * H]."""
    return torch.addmm(bias, x.flatten(0, 1), W.t()).view(*x.shape[:2], -1)


def _input_gradients(d_gates: Tensor, x: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the input weights and the bias."""
    flat = d_gates.flatten(0, 1)
    return (flat @ W).view_as(x), flat.t() @ x.flatten(0, 1), flat.sum(0)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, U: Tensor, bias: Tensor, reset: Tensor, h0: Tensor, c0: Tensor
    ) -> tuple[Tensor, ...]:
        gates, h, c = _input_gates(x, W, bias), _states_before(h0, reset), _states_before(c0, reset)
        y = torch.empty_like(h[1:])
        arrays = [a.numpy() for a in (gates, reset, h, c, y)]
        lanes, back = _lanes(y.shape[-1]), U.t()
        for t in range(len(y)):
            gates[t].addmm_(h[t], back)
            _lstm_step(t, *arrays, lanes)
        ctx.save_for_backward(x, W, U, gates, reset, h, c)
        return y, h[-1].clone(), c[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, W, U, gates, reset, h, c = ctx.saved_tensors
        g_y, dh, dc, d_gates = grads[0].contiguous(), grads[1].clone(), grads[2].clone(), torch.empty_like(gates)
        arrays = [a.numpy() for a in (gates, reset, c, g_y, dh, dc, d_gates)]
        lanes = _lanes(g_y.shape[-1])
        for t in range(len(g_y) - 1, -1, -1):
            _lstm_step_backward(t, *arrays, lanes)
            torch.mm(d_gates[t], U, out=dh)
        dx, dW, dbias = _input_gradients(d_gates, x, W)
        dU = d_gates.flatten(0, 1).t() @ h[:-1].flatten(0, 1)
        first = reset[0][:, None]
        return dx, dW, dU, dbias, None, torch.where(first, 0, dh), torch.where(first, 0, dc)


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, U: Tensor, bias: Tensor, self_bias: Tensor, reset: Tensor, h0: Tensor
    ) -> tuple[Tensor, ...]:
        gates, h = _input_gates(x, W, bias), _states_before(h0, reset)
        recurrent, y = torch.empty_like(gates), torch.empty_like(h[1:])
        arrays = [a.numpy() for a in (gates, recurrent, reset, h, y)]
        lanes, back = _lanes(y.shape[-1]), U.t()
        for t in range(len(y)):
            torch.addmm(self_bias, h[t], back, out=recurrent[t])
            _gru_step(t, *arrays, lanes)
        ctx.save_for_backward(x, W, U, gates, recurrent, reset, h)
        return y, h[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, W, U, gates, recurrent, reset, h = ctx.saved_tensors
        g_y, dh, direct = grads[0].contiguous(), grads[1].clone(), torch.empty_like(grads[1])
        d_gates, d_recurrent = torch.empty_like(gates), torch.empty_like(recurrent)
        arrays = [a.numpy() for a in (gates, recurrent, reset, h, g_y, dh, direct, d_gates, d_recurrent)]
        lanes = _lanes(g_y.shape[-1])
        for t in range(len(g_y) - 1, -1, -1):
            _gru_step_backward(t, *arrays, lanes)
            torch.addmm(direct, d_recurrent[t], U, out=dh)
        dx, dW, dbias = _input_gradients(d_gates, x, W)
        flat = d_recurrent.flatten(0, 1)
        dU = flat.t() @ h[:-1].flatten(0, 1)
        return dx, dW, dU, dbias, flat.sum(0), None, torch.where(reset[0][:, None], 0, dh)


def lstm(
    x: Tensor, W: Tensor, U: Tensor, bias: Tensor, reset: Tensor, h0: Tensor, c0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x: [T, B, D]; W: [4H, D], U: [4H, H], bias: [4H] of input, forget, cell, output; h0, c0: [B, H]."""
    return _Lstm.apply(x, W, U, bias, reset.contiguous(), h0, c0)  # type: ignore


def gru(
    x: Tensor, W: Tensor, U: Tensor, bias: Tensor, self_bias: Tensor, reset: Tensor, h0: Tensor
) -> tuple[Tensor, Tensor]:
    """x: [T, B, D]; W: [3H, D], U: [3H, H], both biases [3H] of reset, update, new; h0: [B, H]."""
    return _Gru.apply(x, W, U, bias, self_bias, reset.contiguous(), h0)  # type: ignore
