"""LSTM and GRU over a chunk in which episodes start anywhere: a matrix product per row, gates compiled.

PyTorch's fused CPU call knows no resets, and packing episodes into it falls back to a slow path. Here a row is one
product with the recurrent weights and one pass over the gates; a reset costs nothing, and the gradient of the weights
is a single product at the end.
"""
# pyright: reportCallIssue=false, reportIncompatibleMethodOverride=false

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.ops.jit import compiler
from bestiary.ops.simd import load, sigmoid, spread, store, tanh, zeros

compiled = compiler(error_model="numpy")


@compiled
def _lstm_row(t, gates, reset, h, c, y, lanes):
    """gates[t] [B, 4H] go through their functions in place. h, c [T + 1, B, H]: what enters each row, reset or not."""
    T, B, H = y.shape
    for b in range(B):
        kept = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            i, f = sigmoid(load(gates, (t, b, j), lanes)), sigmoid(load(gates, (t, b, H + j), lanes))
            g, o = tanh(load(gates, (t, b, 2 * H + j), lanes)), sigmoid(load(gates, (t, b, 3 * H + j), lanes))
            cell = f * load(c, (t, b, j), lanes) + i * g
            shown = o * tanh(cell)
            store(gates, (t, b, j), lanes, i)
            store(gates, (t, b, H + j), lanes, f)
            store(gates, (t, b, 2 * H + j), lanes, g)
            store(gates, (t, b, 3 * H + j), lanes, o)
            store(y, (t, b, j), lanes, shown)
            store(h, (t + 1, b, j), lanes, shown if kept else zeros(y, lanes))
            store(c, (t + 1, b, j), lanes, cell if kept else zeros(y, lanes))


@compiled
def _lstm_row_back(t, gates, reset, c, g_y, dh, dc, d_gates, lanes):
    """d_gates[t]: before their functions. dh, dc [B, H]: of what enters row t + 1; dc then of what enters row t."""
    T, B, H = g_y.shape
    for b in range(B):
        kept = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            one = spread(1, zeros(g_y, lanes))
            i, f = load(gates, (t, b, j), lanes), load(gates, (t, b, H + j), lanes)
            g, o = load(gates, (t, b, 2 * H + j), lanes), load(gates, (t, b, 3 * H + j), lanes)
            before = load(c, (t, b, j), lanes)
            shown = tanh(f * before + i * g)
            grad, cell = load(g_y, (t, b, j), lanes), zeros(g_y, lanes)
            if kept:
                grad, cell = grad + load(dh, (b, j), lanes), load(dc, (b, j), lanes)
            cell = cell + grad * o * (one - shown * shown)
            store(d_gates, (t, b, j), lanes, cell * g * i * (one - i))
            store(d_gates, (t, b, H + j), lanes, cell * before * f * (one - f))
            store(d_gates, (t, b, 2 * H + j), lanes, cell * i * (one - g * g))
            store(d_gates, (t, b, 3 * H + j), lanes, grad * shown * o * (one - o))
            store(dc, (b, j), lanes, cell * f)


@compiled
def _gru_row(t, gates, heard, reset, h, y, lanes):
    """gates[t] [B, 3H], from the input, and heard[t], from the last output, become reset, update, new in gates."""
    T, B, H = y.shape
    for b in range(B):
        kept = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            one = spread(1, zeros(y, lanes))
            r = sigmoid(load(gates, (t, b, j), lanes) + load(heard, (t, b, j), lanes))
            z = sigmoid(load(gates, (t, b, H + j), lanes) + load(heard, (t, b, H + j), lanes))
            n = tanh(load(gates, (t, b, 2 * H + j), lanes) + r * load(heard, (t, b, 2 * H + j), lanes))
            shown = (one - z) * n + z * load(h, (t, b, j), lanes)
            store(gates, (t, b, j), lanes, r)
            store(gates, (t, b, H + j), lanes, z)
            store(gates, (t, b, 2 * H + j), lanes, n)
            store(y, (t, b, j), lanes, shown)
            store(h, (t + 1, b, j), lanes, shown if kept else zeros(y, lanes))


@compiled
def _gru_row_back(t, gates, heard, reset, h, g_y, dh, direct, d_gates, d_heard, lanes):
    """d_gates[t], d_heard[t]: before their functions; direct [B, H]: the last output's gradient that skips them."""
    T, B, H = g_y.shape
    for b in range(B):
        kept = not (t + 1 < T and reset[t + 1, b])
        for j in range(0, H, len(lanes)):
            one = spread(1, zeros(g_y, lanes))
            r, z = load(gates, (t, b, j), lanes), load(gates, (t, b, H + j), lanes)
            n, consulted = load(gates, (t, b, 2 * H + j), lanes), load(heard, (t, b, 2 * H + j), lanes)
            grad = load(g_y, (t, b, j), lanes)
            if kept:
                grad = grad + load(dh, (b, j), lanes)
            d_n = grad * (one - z) * (one - n * n)
            d_z = grad * (load(h, (t, b, j), lanes) - n) * z * (one - z)
            d_r = d_n * consulted * r * (one - r)
            store(d_gates, (t, b, j), lanes, d_r)
            store(d_gates, (t, b, H + j), lanes, d_z)
            store(d_gates, (t, b, 2 * H + j), lanes, d_n)
            store(d_heard, (t, b, j), lanes, d_r)
            store(d_heard, (t, b, H + j), lanes, d_z)
            store(d_heard, (t, b, 2 * H + j), lanes, d_n * r)
            store(direct, (b, j), lanes, grad * z)


def _lanes(width: int) -> tuple[int, ...]:
    return (0,) * next(n for n in (16, 8, 4, 2, 1) if width % n == 0)


def _entering(first: Tensor, reset: Tensor) -> Tensor:
    """[T + 1, B, H], of which row 0 is known."""
    h = first.new_empty(len(reset) + 1, *first.shape)
    h[0] = torch.where(reset[0][:, None], 0, first)
    return h


def _from_input(x: Tensor, W: Tensor, bias: Tensor) -> Tensor:
    """[T, B, gates * H]: as far as the input decides."""
    return torch.addmm(bias, x.flatten(0, 1), W.t()).view(*x.shape[:2], -1)


def _to_input(d_gates: Tensor, x: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, its weights and their bias."""
    flat = d_gates.flatten(0, 1)
    return (flat @ W).view_as(x), flat.t() @ x.flatten(0, 1), flat.sum(0)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, U: Tensor, bias: Tensor, reset: Tensor, h0: Tensor, c0: Tensor
    ) -> tuple[Tensor, ...]:
        gates, h, c = _from_input(x, W, bias), _entering(h0, reset), _entering(c0, reset)
        y = torch.empty_like(h[1:])
        arrays = [a.numpy() for a in (gates, reset, h, c, y)]
        lanes, back = _lanes(y.shape[-1]), U.t()
        for t in range(len(y)):
            gates[t].addmm_(h[t], back)
            _lstm_row(t, *arrays, lanes)
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
            _lstm_row_back(t, *arrays, lanes)
            torch.mm(d_gates[t], U, out=dh)
        dx, dW, dbias = _to_input(d_gates, x, W)
        dU = d_gates.flatten(0, 1).t() @ h[:-1].flatten(0, 1)
        first = reset[0][:, None]
        return dx, dW, dU, dbias, None, torch.where(first, 0, dh), torch.where(first, 0, dc)


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, U: Tensor, bias: Tensor, self_bias: Tensor, reset: Tensor, h0: Tensor
    ) -> tuple[Tensor, ...]:
        gates, h = _from_input(x, W, bias), _entering(h0, reset)
        heard, y = torch.empty_like(gates), torch.empty_like(h[1:])
        arrays = [a.numpy() for a in (gates, heard, reset, h, y)]
        lanes, back = _lanes(y.shape[-1]), U.t()
        for t in range(len(y)):
            torch.addmm(self_bias, h[t], back, out=heard[t])
            _gru_row(t, *arrays, lanes)
        ctx.save_for_backward(x, W, U, gates, heard, reset, h)
        return y, h[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, W, U, gates, heard, reset, h = ctx.saved_tensors
        g_y, dh, direct = grads[0].contiguous(), grads[1].clone(), torch.empty_like(grads[1])
        d_gates, d_heard = torch.empty_like(gates), torch.empty_like(heard)
        arrays = [a.numpy() for a in (gates, heard, reset, h, g_y, dh, direct, d_gates, d_heard)]
        lanes = _lanes(g_y.shape[-1])
        for t in range(len(g_y) - 1, -1, -1):
            _gru_row_back(t, *arrays, lanes)
            torch.addmm(direct, d_heard[t], U, out=dh)
        dx, dW, dbias = _to_input(d_gates, x, W)
        flat = d_heard.flatten(0, 1)
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
