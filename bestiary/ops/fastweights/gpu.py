"""The four rules as Triton kernels and differentiable functions on CUDA tensors; not timed on a GPU so far.

One program works through one stream, a head of a batch row: n = b * heads + h, of N. Its memory is a tile that stays
in registers for the whole chunk. Rows are [T, N, ...] and memories [N, D, D] (key by value) in the kernels, which is
how [T, B, H, ...] and [B, H, D, D] lie anyway; resets are [T, B]. D need not be a power of two but tiles must be: the
lanes beyond D hold zeros.

Every rule adds key written^T to its memory, so the way back takes it off again, row by row, from the memory at the
end of a stretch. A stretch ends with its block or before a reset; the memory at its end is made again from its start,
where it was noted (a block's first row) or is empty (a reset). So nothing is inverted, and rounding builds up over
one block at most. G is the gradient of the memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.ops.fastweights.loops import PREVIOUS_EPS, FeatureMap, Recurrence

BLOCK = 16  # rows from one noted memory to the next
TILE_PER_WARP = 512  # numbers of a memory: 16 registers of each thread, so that four memories fit


@triton.jit
def _load(at, lanes, D: tl.constexpr):
    return tl.load(at + lanes, mask=lanes < D, other=0.0)


@triton.jit
def _store(at, row, lanes, D: tl.constexpr):
    tl.store(at + lanes, row, mask=lanes < D)


@triton.jit
def _load_tile(at, lanes, D: tl.constexpr):
    i, j = lanes[:, None], lanes[None, :]
    return tl.load(at + i * D + j, mask=(i < D) & (j < D), other=0.0)


@triton.jit
def _store_tile(at, tile, lanes, D: tl.constexpr):
    i, j = lanes[:, None], lanes[None, :]
    tl.store(at + i * D + j, tile, mask=(i < D) & (j < D))


@triton.jit
def _outer(k, v):
    return k[:, None] * v[None, :]


@triton.jit
def _ask(W, q):
    """W^T q."""
    return tl.sum(W * q[:, None], 0)


@triton.jit
def _ask_back(W, g):
    """W g."""
    return tl.sum(W * g[None, :], 1)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _softmax(x, eps, lanes, D: tl.constexpr):
    """Over the sum of its exponentials plus eps; the largest counts as a constant."""
    x = tl.where(lanes < D, x, -float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    return p / (tl.sum(p, 0) + eps)


@triton.jit
def _softmax_back(p, dp):
    return p * (dp - tl.sum(p * dp, 0))


@triton.jit
def _elu(x, lanes, D: tl.constexpr):
    """ELU + 1."""
    return tl.where(lanes < D, tl.where(x > 0, x + 1, tl.exp(x)), 0.0)


@triton.jit
def _map(x, lanes, D: tl.constexpr, PHI: tl.constexpr):
    if PHI == "softmax":
        p = _softmax(x, 0.0, lanes, D)
    elif PHI == "elu":
        a = _elu(x, lanes, D)
        p = a / (tl.sum(a, 0) + 1e-5)
    else:
        a = x * tl.sigmoid(x)
        p = a / tl.sqrt(tl.sum(a * a, 0) + 1e-6)
    return p


@triton.jit
def _map_back(x, p, dp, lanes, D: tl.constexpr, PHI: tl.constexpr):
    """From p = phi(x) and its gradient the gradient of x."""
    if PHI == "softmax":
        dx = _softmax_back(p, dp)
    elif PHI == "elu":
        a = _elu(x, lanes, D)
        slope = tl.where(x > 0, 1.0, a) / (tl.sum(a, 0) + 1e-5)
        dx = slope * (dp - tl.sum(p * dp, 0))
    else:
        s = tl.sigmoid(x)
        a = x * s
        slope = (s + a * (1 - s)) / tl.sqrt(tl.sum(a * a, 0) + 1e-6)
        dx = slope * (dp - tl.sum(p * dp, 0) * p)
    return dx


@triton.jit
def _enter(W, new, saved, t, n, N, lanes, D: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr):
    """The memory before row t: emptied where an episode starts, noted where a block does."""
    W = tl.where(new, 0.0, W)
    if LEARNS and t % BLOCK == 0:
        _store_tile(saved + (t // BLOCK * N + n) * D * D, W, lanes, D)
    return W


@triton.jit
def _remake(saved, key, written, begin, stop, n, N, lanes, D: tl.constexpr, BLOCK: tl.constexpr):
    """The memory after row stop - 1 of the stretch that starts with row `begin`."""
    W = _load_tile(saved + (begin // BLOCK * N + n) * D * D, lanes, D)
    W = tl.where(begin % BLOCK == 0, W, 0.0)  # a stretch that starts within a block starts with a reset
    for t in range(begin, stop):
        at = (t * N + n) * D
        W += _outer(_load(key + at, lanes, D), _load(written + at, lanes, D))
    return W


@triton.jit
def _delta_write(W, k, v, beta):
    written = beta * (v - _ask(W, k))
    return W + _outer(k, written), written


@triton.jit
def _delta_row_back(W, G, q, k, written, beta, g):
    """From g, the gradient of the answer, those of query, key, value and raw write strength; W, G before the row."""
    dq = _ask_back(W, g)
    W -= _outer(k, written)
    G += _outer(q, g)
    u = _ask(G, k)
    dv = beta * u
    dk = tl.sum(G * written[None, :] - W * dv[None, :], 1)
    return W, G - _outer(k, dv), dq, dk, dv, tl.sum(u * written, 0) * (1 - beta)


@triton.jit
def _linear_transformer_forward(
    x, reset, W_first, W_last, y, key, written, saved, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """x: [T, N, 3D] query, key, value."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    W = _load_tile(W_first + n * D * D, lanes, D)
    for t in range(T):
        row = t * N + n
        W = _enter(W, tl.load(reset + row // heads), saved, t, n, N, lanes, D, BLOCK, LEARNS)
        at = x + row * 3 * D
        q, k = _map(_load(at, lanes, D), lanes, D, PHI), _map(_load(at + D, lanes, D), lanes, D, PHI)
        v = _load(at + 2 * D, lanes, D)
        W += _outer(k, v)
        _store(y + row * D, _ask(W, q), lanes, D)
        if LEARNS:
            _store(key + row * D, k, lanes, D)
            _store(written + row * D, v, lanes, D)
    _store_tile(W_last + n * D * D, W, lanes, D)


@triton.jit
def _linear_transformer_backward(
    x, begins, cut, key, written, saved, dy, dW_last, dx, dW_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    G = _load_tile(dW_last + n * D * D, lanes, D)
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _remake(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            row = t * N + n
            at, to = x + row * 3 * D, dx + row * 3 * D
            raw_q, raw_k = _load(at, lanes, D), _load(at + D, lanes, D)
            q, k, v = _map(raw_q, lanes, D, PHI), _load(key + row * D, lanes, D), _load(at + 2 * D, lanes, D)
            g = _load(dy + row * D, lanes, D)
            dq = _ask_back(W, g)
            W -= _outer(k, v)
            G += _outer(q, g)
            _store(to, _map_back(raw_q, q, dq, lanes, D, PHI), lanes, D)
            _store(to + D, _map_back(raw_k, k, _ask_back(G, v), lanes, D, PHI), lanes, D)
            _store(to + 2 * D, _ask(G, k), lanes, D)
            G = tl.where(tl.load(cut + row // heads), 0.0, G)
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)


@triton.jit
def _delta_net_forward(
    x, reset, W_first, W_last, y, key, written, saved, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """x: [T, N, 3D + 1] query, key, value, write strength before the logistic function."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    W = _load_tile(W_first + n * D * D, lanes, D)
    for t in range(T):
        row = t * N + n
        W = _enter(W, tl.load(reset + row // heads), saved, t, n, N, lanes, D, BLOCK, LEARNS)
        at = x + row * (3 * D + 1)
        q, k = _map(_load(at, lanes, D), lanes, D, PHI), _map(_load(at + D, lanes, D), lanes, D, PHI)
        W, change = _delta_write(W, k, _load(at + 2 * D, lanes, D), tl.sigmoid(tl.load(at + 3 * D)))
        _store(y + row * D, _ask(W, q), lanes, D)
        if LEARNS:
            _store(key + row * D, k, lanes, D)
            _store(written + row * D, change, lanes, D)
    _store_tile(W_last + n * D * D, W, lanes, D)


@triton.jit
def _delta_net_row_back(x, key, written, row, W, G, g, dx, lanes, D: tl.constexpr, PHI: tl.constexpr):
    """Writes the gradient of the row x: [3D + 1], and gives its parts."""
    at, to = x + row * (3 * D + 1), dx + row * (3 * D + 1)
    raw_q, raw_k, beta = _load(at, lanes, D), _load(at + D, lanes, D), tl.sigmoid(tl.load(at + 3 * D))
    q, k = _map(raw_q, lanes, D, PHI), _load(key + row * D, lanes, D)
    W, G, dq, dk, dv, dbeta = _delta_row_back(W, G, q, k, _load(written + row * D, lanes, D), beta, g)
    dq, dk = _map_back(raw_q, q, dq, lanes, D, PHI), _map_back(raw_k, k, dk, lanes, D, PHI)
    _store(to, dq, lanes, D)
    _store(to + D, dk, lanes, D)
    _store(to + 2 * D, dv, lanes, D)
    tl.store(to + 3 * D, dbeta)
    return W, G, dq, dk, dv, dbeta


@triton.jit
def _delta_net_backward(
    x, begins, cut, key, written, saved, dy, dW_last, dx, dW_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    G = _load_tile(dW_last + n * D * D, lanes, D)
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _remake(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            row = t * N + n
            g = _load(dy + row * D, lanes, D)
            W, G, _, _, _, _ = _delta_net_row_back(x, key, written, row, W, G, g, dx, lanes, D, PHI)
            G = tl.where(tl.load(cut + row // heads), 0.0, G)
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)


@triton.jit
def _recurrent_delta_net_forward(
    x, R_q, R_k, R_v, r_beta, reset, W_first, y_first, W_last, y, key, written, heard, told, saved, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """x as for a Delta Net; heard: tanh of the previous answer; told: x with what was heard added."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    h = n % heads
    W = _load_tile(W_first + n * D * D, lanes, D)
    Rq, Rk = _load_tile(R_q + h * D * D, lanes, D), _load_tile(R_k + h * D * D, lanes, D)
    Rv, rb = _load_tile(R_v + h * D * D, lanes, D), _load(r_beta + h * D, lanes, D)
    answer = _load(y_first + n * D, lanes, D)
    for t in range(T):
        row = t * N + n
        new = tl.load(reset + row // heads)
        W = _enter(W, new, saved, t, n, N, lanes, D, BLOCK, LEARNS)
        u = tl.where(new, 0.0, _tanh(answer))
        at, to = x + row * (3 * D + 1), told + row * (3 * D + 1)
        raw_q, raw_k = _load(at, lanes, D) + _ask(Rq, u), _load(at + D, lanes, D) + _ask(Rk, u)
        v, raw_beta = _load(at + 2 * D, lanes, D) + _ask(Rv, u), tl.load(at + 3 * D) + tl.sum(u * rb, 0)
        q, k = _map(raw_q, lanes, D, PHI), _map(raw_k, lanes, D, PHI)
        W, change = _delta_write(W, k, v, tl.sigmoid(raw_beta))
        answer = _ask(W, q)
        _store(y + row * D, answer, lanes, D)
        if LEARNS:
            _store(key + row * D, k, lanes, D)
            _store(written + row * D, change, lanes, D)
            _store(heard + row * D, u, lanes, D)
            _store(to, raw_q, lanes, D)
            _store(to + D, raw_k, lanes, D)
            _store(to + 2 * D, v, lanes, D)
            tl.store(to + 3 * D, raw_beta)
    _store_tile(W_last + n * D * D, W, lanes, D)


@triton.jit
def _recurrent_delta_net_backward(
    told, R_q, R_k, R_v, r_beta, begins, cut, key, written, heard, saved, dy, dW_last, dx, dW_first, dy_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    h = n % heads
    G = _load_tile(dW_last + n * D * D, lanes, D)
    Rq, Rk = _load_tile(R_q + h * D * D, lanes, D), _load_tile(R_k + h * D * D, lanes, D)
    Rv, rb = _load_tile(R_v + h * D * D, lanes, D), _load(r_beta + h * D, lanes, D)
    later = tl.zeros_like(rb)  # what the next row adds to the gradient of this answer
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _remake(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            row = t * N + n
            g = _load(dy + row * D, lanes, D) + later
            W, G, dq, dk, dv, dbeta = _delta_net_row_back(told, key, written, row, W, G, g, dx, lanes, D, PHI)
            du = tl.sum(Rq * dq[None, :] + Rk * dk[None, :] + Rv * dv[None, :], 1) + rb * dbeta
            u = _load(heard + row * D, lanes, D)
            constant = tl.load(cut + row // heads)
            G, later = tl.where(constant, 0.0, G), tl.where(constant, 0.0, du * (1 - u * u))
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)
    _store(dy_first + n * D, later, lanes, D)


@triton.jit
def _delta_rnn_forward(
    x, reset, W_first, R_first, y_first, W_last, R_last, y, key, written, previous, key_2, written_2, saved, saved_2,
    T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """x: [T, N, 5D + 2] query, key, value, second key, second value, both write strengths."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    W, R = _load_tile(W_first + n * D * D, lanes, D), _load_tile(R_first + n * D * D, lanes, D)
    answer = _load(y_first + n * D, lanes, D)
    for t in range(T):
        row = t * N + n
        new = tl.load(reset + row // heads)
        W = _enter(W, new, saved, t, n, N, lanes, D, BLOCK, LEARNS)
        R = _enter(R, new, saved_2, t, n, N, lanes, D, BLOCK, LEARNS)
        p = _softmax(tl.where(new, 0.0, answer), EPS, lanes, D)
        at = x + row * (5 * D + 2)
        q, k = _map(_load(at, lanes, D), lanes, D, PHI), _map(_load(at + D, lanes, D), lanes, D, PHI)
        k_2 = _map(_load(at + 3 * D, lanes, D), lanes, D, PHI)
        W, change = _delta_write(W, k, _load(at + 2 * D, lanes, D), tl.sigmoid(tl.load(at + 5 * D)))
        R, change_2 = _delta_write(R, k_2, _load(at + 4 * D, lanes, D), tl.sigmoid(tl.load(at + 5 * D + 1)))
        answer = _ask(W, q) + _ask(R, p)
        _store(y + row * D, answer, lanes, D)
        if LEARNS:
            _store(key + row * D, k, lanes, D)
            _store(written + row * D, change, lanes, D)
            _store(previous + row * D, p, lanes, D)
            _store(key_2 + row * D, k_2, lanes, D)
            _store(written_2 + row * D, change_2, lanes, D)
    _store_tile(W_last + n * D * D, W, lanes, D)
    _store_tile(R_last + n * D * D, R, lanes, D)


@triton.jit
def _delta_rnn_backward(
    x, begins, cut, key, written, previous, key_2, written_2, saved, saved_2, dy, dW_last, dR_last,
    dx, dW_first, dR_first, dy_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    G, G_2 = _load_tile(dW_last + n * D * D, lanes, D), _load_tile(dR_last + n * D * D, lanes, D)
    later = tl.zeros_like(_load(dy, lanes, D))  # what the next row adds to the gradient of this answer
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _remake(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        R = _remake(saved_2, key_2, written_2, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            row = t * N + n
            at, to = x + row * (5 * D + 2), dx + row * (5 * D + 2)
            g = _load(dy + row * D, lanes, D) + later

            raw_q, raw_k, beta = _load(at, lanes, D), _load(at + D, lanes, D), tl.sigmoid(tl.load(at + 5 * D))
            q, k, change = (
                _map(raw_q, lanes, D, PHI),
                _load(key + row * D, lanes, D),
                _load(written + row * D, lanes, D),
            )
            W, G, dq, dk, dv, dbeta = _delta_row_back(W, G, q, k, change, beta, g)
            _store(to, _map_back(raw_q, q, dq, lanes, D, PHI), lanes, D)
            _store(to + D, _map_back(raw_k, k, dk, lanes, D, PHI), lanes, D)
            _store(to + 2 * D, dv, lanes, D)
            tl.store(to + 5 * D, dbeta)

            raw_k, beta = _load(at + 3 * D, lanes, D), tl.sigmoid(tl.load(at + 5 * D + 1))
            p, k = _load(previous + row * D, lanes, D), _load(key_2 + row * D, lanes, D)
            change = _load(written_2 + row * D, lanes, D)
            R, G_2, dp, dk, dv, dbeta = _delta_row_back(R, G_2, p, k, change, beta, g)
            _store(to + 3 * D, _map_back(raw_k, k, dk, lanes, D, PHI), lanes, D)
            _store(to + 4 * D, dv, lanes, D)
            tl.store(to + 5 * D + 1, dbeta)

            constant = tl.load(cut + row // heads)
            G, G_2 = tl.where(constant, 0.0, G), tl.where(constant, 0.0, G_2)
            later = tl.where(constant, 0.0, _softmax_back(p, dp))
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)
    _store_tile(dR_first + n * D * D, G_2, lanes, D)
    _store(dy_first + n * D, later, lanes, D)


class _Call:
    """The sizes of a call, what is kept for its way back, and how its kernels start."""

    def __init__(self, ctx: Any, x: Tensor, W: Tensor, phi: FeatureMap, bptt: int | None) -> None:
        self.rows, self.batch, self.heads, _ = x.shape
        self.width = W.shape[-1]
        self.learns = any(ctx.needs_input_grad)
        self.phi, self.bptt, self.block = phi, bptt, BLOCK

    def per_row(self, x: Tensor, width: int) -> Tensor:
        return x.new_empty(self.rows, self.batch, self.heads, width)

    def kept(self, x: Tensor, width: int) -> Tensor:
        """What the way back needs of each row; nothing without one."""
        return self.per_row(x, width) if self.learns else x.new_empty(0)

    def saved(self, W: Tensor) -> Tensor:
        """The memory at the start of each block."""
        return W.new_empty(triton.cdiv(self.rows, self.block) if self.learns else 0, *W.shape)

    def stretches(self, reset: Tensor) -> tuple[Tensor, Tensor]:
        """Where the stretch of each row starts, and whether the gradient ends there: both [T, B]."""
        row = torch.arange(self.rows, device=reset.device, dtype=torch.int32)[:, None]
        begins = torch.where(reset | (row % self.block == 0), row, 0).cummax(0).values
        return begins, reset | (row % self.bptt == 0) if self.bptt else reset

    def run(self, kernel: Any, *tensors: Tensor, **constants: Any) -> None:
        P = triton.next_power_of_2(self.width)
        warps = min(max(P * P // TILE_PER_WARP, 1), 16)
        with torch.cuda.device_of(tensors[0]):
            kernel[(self.batch * self.heads,)](
                *tensors, self.rows, self.heads, D=self.width, P=P, PHI=self.phi, BLOCK=self.block,
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
        y, W_last = call.per_row(x, call.width), torch.empty_like(W)
        held = call.kept(x, call.width), call.kept(x, call.width), call.saved(W)
        kernel = _delta_net_forward if delta else _linear_transformer_forward
        call.run(kernel, x, reset, W, W_last, y, *held, LEARNS=call.learns)
        ctx.save_for_backward(x, reset, *held)
        ctx.rest = call, delta
        return y, W_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x, reset, *held = ctx.saved_tensors
        call, delta = ctx.rest
        dy, dW = (grad.contiguous() for grad in grads)
        dx, dW_first = torch.empty_like(x), torch.empty_like(dW)
        kernel = _delta_net_backward if delta else _linear_transformer_backward
        call.run(kernel, x, *call.stretches(reset), *held, dy, dW, dx, dW_first)
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
        y, W_last = call.per_row(x, call.width), torch.empty_like(W)
        key, written, heard = (call.kept(x, call.width) for _ in range(3))
        told, saved = call.kept(x, x.shape[-1]), call.saved(W)
        call.run(
            _recurrent_delta_net_forward, x, *R, reset, W, y_first, W_last, y, key, written, heard, told, saved,
            LEARNS=call.learns,
        )  # fmt: skip
        ctx.save_for_backward(told, *R, reset, key, written, heard, saved)
        ctx.call = call
        return y, W_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        told, *R, reset, key, written, heard, saved = ctx.saved_tensors
        call, D = ctx.call, ctx.call.width
        dy, dW = (grad.contiguous() for grad in grads)
        dx, dW_first, dy_first = torch.empty_like(told), torch.empty_like(dW), torch.empty_like(dy[0])
        call.run(
            _recurrent_delta_net_backward, told, *R, *call.stretches(reset), key, written, heard, saved, dy, dW,
            dx, dW_first, dy_first,
        )  # fmt: skip
        # the weights of the recurrence meet every row at once
        found = torch.einsum("tbhi,tbhj->hij", heard, dx)  # [H, D, 3D + 1]
        into = [*found[..., : 3 * D].split(D, -1), found[..., 3 * D]]
        return dx, *into, None, dW_first, dy_first, None, None


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
        y, W_last, R_last = call.per_row(x, call.width), torch.empty_like(W), torch.empty_like(R)
        held = [call.kept(x, call.width) for _ in range(5)] + [call.saved(W), call.saved(R)]
        call.run(
            _delta_rnn_forward, x, reset, W, R, y_first, W_last, R_last, y, *held, LEARNS=call.learns, EPS=eps
        )  # fmt: skip
        ctx.save_for_backward(x, reset, *held)
        ctx.call = call
        return y, W_last, R_last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        x, reset, *held = ctx.saved_tensors
        dy, dW, dR = (grad.contiguous() for grad in grads)
        found = [torch.empty_like(a) for a in (x, dW, dR, dy[0])]
        ctx.call.run(_delta_rnn_backward, x, *ctx.call.stretches(reset), *held, dy, dW, dR, *found)
        return found[0], None, *found[1:], None, None, None


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
    weights = R if torch.is_grad_enabled() else [r.detach() for r in R]  # or parameters alone would make rows be kept
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
