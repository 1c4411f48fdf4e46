"""Triton kernels of the four fast-weight rules, forward and backward; not timed on a GPU so far.

A program instance processes one stream, which is one head of one batch entry: n = b * heads + h, of N. Its memory is a
tile that stays in registers for the whole chunk. In the kernels steps are [T, N, ...] and memories [N, D, D] (key by
value), which is the layout of contiguous [T, B, H, ...] and [B, H, D, D]; resets are [T, B]. D need not be a power of
two but tiles must be: the lanes beyond D hold zeros.

Every rule adds key written^T to its memory, so the backward pass subtracts it again, step by step, from the memory at
the end of a segment. A segment ends with its block or before a reset; the memory at its end is recomputed from its
start, which was stored (at the first step of a block) or is zero (at a reset). So nothing is inverted, and rounding
errors accumulate over one block at most. G is the gradient of the memory.
"""
# pyright: standard

import triton
import triton.language as tl


@triton.jit
def _load(at, lanes, D: tl.constexpr):
    return tl.load(at + lanes, mask=lanes < D, other=0.0)


@triton.jit
def _store(at, step, lanes, D: tl.constexpr):
    tl.store(at + lanes, step, mask=lanes < D)


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
def _read(W, q):
    """W^T q."""
    return tl.sum(W * q[:, None], 0)


@triton.jit
def _read_transposed(W, g):
    """W g."""
    return tl.sum(W * g[None, :], 1)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _softmax(x, eps, lanes, D: tl.constexpr):
    """exp(x - max x) / (sum exp(x - max x) + eps)."""
    x = tl.where(lanes < D, x, -float("inf"))
    p = tl.exp(x - tl.max(x, 0))
    return p / (tl.sum(p, 0) + eps)


@triton.jit
def _softmax_backward(p, dp):
    return p * (dp - tl.sum(p * dp, 0))


@triton.jit
def _elu(x, lanes, D: tl.constexpr):
    """ELU + 1."""
    return tl.where(lanes < D, tl.where(x > 0, x + 1, tl.exp(x)), 0.0)


@triton.jit
def _phi(x, lanes, D: tl.constexpr, PHI: tl.constexpr):
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
def _phi_backward(x, p, dp, lanes, D: tl.constexpr, PHI: tl.constexpr):
    """The gradient of x, given p = phi(x) and its gradient dp."""
    if PHI == "softmax":
        dx = _softmax_backward(p, dp)
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
def _memory_before(W, new, saved, t, n, N, lanes, D: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr):
    """The memory before step t: zeroed at a reset, stored in `saved` at the start of a block."""
    W = tl.where(new, 0.0, W)
    if LEARNS and t % BLOCK == 0:
        _store_tile(saved + (t // BLOCK * N + n) * D * D, W, lanes, D)
    return W


@triton.jit
def _recompute(saved, key, written, begin, stop, n, N, lanes, D: tl.constexpr, BLOCK: tl.constexpr):
    """The memory after step stop - 1 of the segment that starts with step `begin`."""
    W = _load_tile(saved + (begin // BLOCK * N + n) * D * D, lanes, D)
    W = tl.where(begin % BLOCK == 0, W, 0.0)  # a segment that starts within a block starts with a reset
    for t in range(begin, stop):
        at = (t * N + n) * D
        W += _outer(_load(key + at, lanes, D), _load(written + at, lanes, D))
    return W


@triton.jit
def _delta_write(W, k, v, beta):
    written = beta * (v - _read(W, k))
    return W + _outer(k, written), written


@triton.jit
def _delta_step_backward(W, G, q, k, written, beta, g):
    """Given g = dL/dy_t: W and G before the step, gradients of query, key, value and write strength logit."""
    dq = _read_transposed(W, g)
    W -= _outer(k, written)
    G += _outer(q, g)
    u = _read(G, k)
    dv = beta * u
    dk = tl.sum(G * written[None, :] - W * dv[None, :], 1)
    return W, G - _outer(k, dv), dq, dk, dv, tl.sum(u * written, 0) * (1 - beta)


@triton.jit
def linear_transformer_forward(
    x, reset, W_first, W_last, y, key, written, saved, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """x: [T, N, 3D] query, key, value."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    W = _load_tile(W_first + n * D * D, lanes, D)
    for t in range(T):
        step = t * N + n
        W = _memory_before(W, tl.load(reset + step // heads), saved, t, n, N, lanes, D, BLOCK, LEARNS)
        at = x + step * 3 * D
        q, k = _phi(_load(at, lanes, D), lanes, D, PHI), _phi(_load(at + D, lanes, D), lanes, D, PHI)
        v = _load(at + 2 * D, lanes, D)
        W += _outer(k, v)
        _store(y + step * D, _read(W, q), lanes, D)
        if LEARNS:
            _store(key + step * D, k, lanes, D)
            _store(written + step * D, v, lanes, D)
    _store_tile(W_last + n * D * D, W, lanes, D)


@triton.jit
def linear_transformer_backward(
    x, begins, cut, key, written, saved, dy, dW_last, dx, dW_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    G = _load_tile(dW_last + n * D * D, lanes, D)
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _recompute(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            step = t * N + n
            at, to = x + step * 3 * D, dx + step * 3 * D
            raw_q, raw_k = _load(at, lanes, D), _load(at + D, lanes, D)
            q, k, v = _phi(raw_q, lanes, D, PHI), _load(key + step * D, lanes, D), _load(at + 2 * D, lanes, D)
            g = _load(dy + step * D, lanes, D)
            dq = _read_transposed(W, g)
            W -= _outer(k, v)
            G += _outer(q, g)
            _store(to, _phi_backward(raw_q, q, dq, lanes, D, PHI), lanes, D)
            _store(to + D, _phi_backward(raw_k, k, _read_transposed(G, v), lanes, D, PHI), lanes, D)
            _store(to + 2 * D, _read(G, k), lanes, D)
            G = tl.where(tl.load(cut + step // heads), 0.0, G)
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)


@triton.jit
def delta_net_forward(
    x, reset, W_first, W_last, y, key, written, saved, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """x: [T, N, 3D + 1] query, key, value, write strength before the logistic function."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    W = _load_tile(W_first + n * D * D, lanes, D)
    for t in range(T):
        step = t * N + n
        W = _memory_before(W, tl.load(reset + step // heads), saved, t, n, N, lanes, D, BLOCK, LEARNS)
        at = x + step * (3 * D + 1)
        q, k = _phi(_load(at, lanes, D), lanes, D, PHI), _phi(_load(at + D, lanes, D), lanes, D, PHI)
        W, u_t = _delta_write(W, k, _load(at + 2 * D, lanes, D), tl.sigmoid(tl.load(at + 3 * D)))
        _store(y + step * D, _read(W, q), lanes, D)
        if LEARNS:
            _store(key + step * D, k, lanes, D)
            _store(written + step * D, u_t, lanes, D)
    _store_tile(W_last + n * D * D, W, lanes, D)


@triton.jit
def _delta_net_step_backward(x, key, written, step, W, G, g, dx, lanes, D: tl.constexpr, PHI: tl.constexpr):
    """Store the gradient of x at this step, [3D + 1], and return its parts."""
    at, to = x + step * (3 * D + 1), dx + step * (3 * D + 1)
    raw_q, raw_k, beta = _load(at, lanes, D), _load(at + D, lanes, D), tl.sigmoid(tl.load(at + 3 * D))
    q, k = _phi(raw_q, lanes, D, PHI), _load(key + step * D, lanes, D)
    W, G, dq, dk, dv, dbeta = _delta_step_backward(W, G, q, k, _load(written + step * D, lanes, D), beta, g)
    dq, dk = _phi_backward(raw_q, q, dq, lanes, D, PHI), _phi_backward(raw_k, k, dk, lanes, D, PHI)
    _store(to, dq, lanes, D)
    _store(to + D, dk, lanes, D)
    _store(to + 2 * D, dv, lanes, D)
    tl.store(to + 3 * D, dbeta)
    return W, G, dq, dk, dv, dbeta


@triton.jit
def delta_net_backward(
    x, begins, cut, key, written, saved, dy, dW_last, dx, dW_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    G = _load_tile(dW_last + n * D * D, lanes, D)
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _recompute(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            step = t * N + n
            g = _load(dy + step * D, lanes, D)
            W, G, _, _, _, _ = _delta_net_step_backward(x, key, written, step, W, G, g, dx, lanes, D, PHI)
            G = tl.where(tl.load(cut + step // heads), 0.0, G)
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)


@triton.jit
def recurrent_delta_net_forward(
    x, R_q, R_k, R_v, r_beta, reset, W_first, y_first, W_last, y, key, written, feedback, x_total, saved, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    """x as for a Delta Net; feedback: u = tanh of the last output; x_total: x plus the recurrent terms."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    h = n % heads
    W = _load_tile(W_first + n * D * D, lanes, D)
    Rq, Rk = _load_tile(R_q + h * D * D, lanes, D), _load_tile(R_k + h * D * D, lanes, D)
    Rv, rb = _load_tile(R_v + h * D * D, lanes, D), _load(r_beta + h * D, lanes, D)
    y_t = _load(y_first + n * D, lanes, D)
    for t in range(T):
        step = t * N + n
        new = tl.load(reset + step // heads)
        W = _memory_before(W, new, saved, t, n, N, lanes, D, BLOCK, LEARNS)
        u = tl.where(new, 0.0, _tanh(y_t))
        at, to = x + step * (3 * D + 1), x_total + step * (3 * D + 1)
        raw_q, raw_k = _load(at, lanes, D) + _read(Rq, u), _load(at + D, lanes, D) + _read(Rk, u)
        v, raw_beta = _load(at + 2 * D, lanes, D) + _read(Rv, u), tl.load(at + 3 * D) + tl.sum(u * rb, 0)
        q, k = _phi(raw_q, lanes, D, PHI), _phi(raw_k, lanes, D, PHI)
        W, u_t = _delta_write(W, k, v, tl.sigmoid(raw_beta))
        y_t = _read(W, q)
        _store(y + step * D, y_t, lanes, D)
        if LEARNS:
            _store(key + step * D, k, lanes, D)
            _store(written + step * D, u_t, lanes, D)
            _store(feedback + step * D, u, lanes, D)
            _store(to, raw_q, lanes, D)
            _store(to + D, raw_k, lanes, D)
            _store(to + 2 * D, v, lanes, D)
            tl.store(to + 3 * D, raw_beta)
    _store_tile(W_last + n * D * D, W, lanes, D)


@triton.jit
def recurrent_delta_net_backward(
    x_total, R_q, R_k, R_v, r_beta, begins, cut, key, written, feedback, saved,
    dy, dW_last, dx, dW_first, dy_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    h = n % heads
    G = _load_tile(dW_last + n * D * D, lanes, D)
    Rq, Rk = _load_tile(R_q + h * D * D, lanes, D), _load_tile(R_k + h * D * D, lanes, D)
    Rv, rb = _load_tile(R_v + h * D * D, lanes, D), _load(r_beta + h * D, lanes, D)
    dy_next = tl.zeros_like(rb)  # the part of dL/dy_t that comes through step t + 1
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _recompute(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            step = t * N + n
            g = _load(dy + step * D, lanes, D) + dy_next
            W, G, dq, dk, dv, dbeta = _delta_net_step_backward(x_total, key, written, step, W, G, g, dx, lanes, D, PHI)
            du = tl.sum(Rq * dq[None, :] + Rk * dk[None, :] + Rv * dv[None, :], 1) + rb * dbeta
            u = _load(feedback + step * D, lanes, D)
            truncated = tl.load(cut + step // heads)
            G, dy_next = tl.where(truncated, 0.0, G), tl.where(truncated, 0.0, du * (1 - u * u))
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)
    _store(dy_first + n * D, dy_next, lanes, D)


@triton.jit
def delta_rnn_forward(
    x, reset, W_first, R_first, y_first, W_last, R_last, y, key, written, previous, key_2, written_2, saved, saved_2,
    T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr, LEARNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """x: [T, N, 5D + 2] query, key, value, second key, second value, both write strengths."""
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    W, R = _load_tile(W_first + n * D * D, lanes, D), _load_tile(R_first + n * D * D, lanes, D)
    y_t = _load(y_first + n * D, lanes, D)
    for t in range(T):
        step = t * N + n
        new = tl.load(reset + step // heads)
        W = _memory_before(W, new, saved, t, n, N, lanes, D, BLOCK, LEARNS)
        R = _memory_before(R, new, saved_2, t, n, N, lanes, D, BLOCK, LEARNS)
        p = _softmax(tl.where(new, 0.0, y_t), EPS, lanes, D)
        at = x + step * (5 * D + 2)
        q, k = _phi(_load(at, lanes, D), lanes, D, PHI), _phi(_load(at + D, lanes, D), lanes, D, PHI)
        k_2 = _phi(_load(at + 3 * D, lanes, D), lanes, D, PHI)
        W, u_t = _delta_write(W, k, _load(at + 2 * D, lanes, D), tl.sigmoid(tl.load(at + 5 * D)))
        R, u_2 = _delta_write(R, k_2, _load(at + 4 * D, lanes, D), tl.sigmoid(tl.load(at + 5 * D + 1)))
        y_t = _read(W, q) + _read(R, p)
        _store(y + step * D, y_t, lanes, D)
        if LEARNS:
            _store(key + step * D, k, lanes, D)
            _store(written + step * D, u_t, lanes, D)
            _store(previous + step * D, p, lanes, D)
            _store(key_2 + step * D, k_2, lanes, D)
            _store(written_2 + step * D, u_2, lanes, D)
    _store_tile(W_last + n * D * D, W, lanes, D)
    _store_tile(R_last + n * D * D, R, lanes, D)


@triton.jit
def delta_rnn_backward(
    x, begins, cut, key, written, previous, key_2, written_2, saved, saved_2, dy, dW_last, dR_last,
    dx, dW_first, dR_first, dy_first, T, heads,
    D: tl.constexpr, P: tl.constexpr, PHI: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, N, lanes = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, P)
    G, G_2 = _load_tile(dW_last + n * D * D, lanes, D), _load_tile(dR_last + n * D * D, lanes, D)
    dy_next = tl.zeros_like(_load(dy, lanes, D))  # the part of dL/dy_t that comes through step t + 1
    stop = T
    while stop > 0:
        begin = tl.load(begins + ((stop - 1) * N + n) // heads)
        W = _recompute(saved, key, written, begin, stop, n, N, lanes, D, BLOCK)
        R = _recompute(saved_2, key_2, written_2, begin, stop, n, N, lanes, D, BLOCK)
        for t in range(stop - 1, begin - 1, -1):
            step = t * N + n
            at, to = x + step * (5 * D + 2), dx + step * (5 * D + 2)
            g = _load(dy + step * D, lanes, D) + dy_next

            raw_q, raw_k, beta = _load(at, lanes, D), _load(at + D, lanes, D), tl.sigmoid(tl.load(at + 5 * D))
            q, k, u_t = (
                _phi(raw_q, lanes, D, PHI),
                _load(key + step * D, lanes, D),
                _load(written + step * D, lanes, D),
            )
            W, G, dq, dk, dv, dbeta = _delta_step_backward(W, G, q, k, u_t, beta, g)
            _store(to, _phi_backward(raw_q, q, dq, lanes, D, PHI), lanes, D)
            _store(to + D, _phi_backward(raw_k, k, dk, lanes, D, PHI), lanes, D)
            _store(to + 2 * D, dv, lanes, D)
            tl.store(to + 5 * D, dbeta)

            raw_k, beta = _load(at + 3 * D, lanes, D), tl.sigmoid(tl.load(at + 5 * D + 1))
            p, k = _load(previous + step * D, lanes, D), _load(key_2 + step * D, lanes, D)
            u_t = _load(written_2 + step * D, lanes, D)
            R, G_2, dp, dk, dv, dbeta = _delta_step_backward(R, G_2, p, k, u_t, beta, g)
            _store(to + 3 * D, _phi_backward(raw_k, k, dk, lanes, D, PHI), lanes, D)
            _store(to + 4 * D, dv, lanes, D)
            tl.store(to + 5 * D + 1, dbeta)

            truncated = tl.load(cut + step // heads)
            G, G_2 = tl.where(truncated, 0.0, G), tl.where(truncated, 0.0, G_2)
            dy_next = tl.where(truncated, 0.0, _softmax_backward(p, dp))
        stop = begin
    _store_tile(dW_first + n * D * D, G, lanes, D)
    _store_tile(dR_first + n * D * D, G_2, lanes, D)
    _store(dy_first + n * D, dy_next, lanes, D)
