"""The four fast-weight rules compiled for the CPU by Numba: forward and backward kernels.

A stream is one head of one batch entry: n = b * heads + h. Arrays are contiguous: inputs and outputs are [T, N, ...],
memories [N, D, D] (key by value), resets [T, B]. `kept` [N, T, parts, D] holds the activations of each time step that
the backward pass needs; without a backward pass it has room for one step only, which is overwritten. A kernel
processes streams lo to hi - 1 without the interpreter lock, so that several threads can share a call.

The backward pass uses gradient checkpointing: it goes through the chunk in blocks of time steps, from the end. The
forward pass stores the memory at the start of each block in `saved`; the backward pass recomputes the memories of the
block from it. So nothing is inverted, no rounding error accumulates, and resets cost nothing. Recomputed memories are
stored value by key, which makes W g a sum of vectors too. G is the gradient of the memory, key by value.
"""
# pyright: standard, reportCallIssue=false
# ruff: noqa: RUF005 (compiled code joins tuples, it does not unpack into them)

import math

import numpy as np
from numba import njit

from bestiary.ops.jit import compiler
from bestiary.ops.simd import (
    broadcast,
    dot,
    exp,
    fma,
    load,
    reduce_max,
    sigmoid,
    store,
    tanh,
    where_positive,
    zeros,
)

BLOCK = 32  # time steps whose memories are recomputed at once: 128 KiB for a head of width 32 in float32
ELU, SOFTMAX, SILU = 0, 1, 2
Q, K, ERROR = 0, 1, 2  # parts of `kept`: phi(query), phi(key), error v - W^T k of the delta rule

compiled = compiler(error_model="numpy")
inlined = njit(nogil=True, error_model="numpy", forceinline=True)


@inlined
def _read(A, at, x, where, lanes):
    """A[at]^T x[where], as two independent sums, so that their additions can overlap."""
    D, even, odd = len(lanes), zeros(A, lanes), zeros(A, lanes)
    for i in range(0, D - D % 2, 2):
        even = fma(x[where + (i,)], load(A, at + (i, 0), lanes), even)
        odd = fma(x[where + (i + 1,)], load(A, at + (i + 1, 0), lanes), odd)
    if D % 2:
        even = fma(x[where + (D - 1,)], load(A, at + (D - 1, 0), lanes), even)
    return even + odd


@inlined
def _write_and_read(before, A, n, x, x_where, row, z, z_where, lanes):
    """A[n] = before[n] + x row^T; returns A[n]^T z."""
    D, even, odd = len(lanes), zeros(A, lanes), zeros(A, lanes)
    for i in range(0, D - D % 2, 2):
        a = fma(x[x_where + (i,)], row, load(before, (n, i, 0), lanes))
        b = fma(x[x_where + (i + 1,)], row, load(before, (n, i + 1, 0), lanes))
        store(A, (n, i, 0), lanes, a)
        store(A, (n, i + 1, 0), lanes, b)
        even = fma(z[z_where + (i,)], a, even)
        odd = fma(z[z_where + (i + 1,)], b, odd)
    if D % 2:
        a = fma(x[x_where + (D - 1,)], row, load(before, (n, D - 1, 0), lanes))
        store(A, (n, D - 1, 0), lanes, a)
        even = fma(z[z_where + (D - 1,)], a, even)
    return even + odd


@inlined
def _zero(A, n, lanes):
    for i in range(len(lanes)):
        store(A, (n, i, 0), lanes, zeros(A, lanes))


@inlined
def _memory_before(t, n, new, W0, W, saved, lanes):
    """The array with the memory before step t: stored in `saved` at the start of a block, zeroed at a reset."""
    before = W if t else W0
    if t % BLOCK == 0 and len(saved):
        for i in range(len(lanes)):
            store(saved, (t // BLOCK, n, i, 0), lanes, load(before, (n, i, 0), lanes))
    if new:
        _zero(W, n, lanes)
        before = W
    return before


@inlined
def _softmax(x, eps):
    """exp(x - max x) / (sum exp(x - max x) + eps)."""
    p = exp(x - broadcast(reduce_max(x), x))
    return p / broadcast(dot(p, broadcast(1, p)) + eps, p)


@inlined
def _phi(phi, x):
    if phi == SOFTMAX:
        return _softmax(x, 0.0)
    if phi == ELU:
        a = where_positive(x, x + broadcast(1, x), exp(x))
        return a / broadcast(dot(a, broadcast(1, a)) + 1e-5, a)
    a = x * sigmoid(x)
    return a / broadcast(math.sqrt(dot(a, a) + 1e-6), a)


@inlined
def _phi_backward(phi, x, p, dp):
    """The gradient of x, given p = phi(x) and its gradient dp."""
    along = broadcast(dot(p, dp), p)
    if phi == SOFTMAX:
        return p * (dp - along)
    one = broadcast(1, x)
    if phi == ELU:
        a = where_positive(x, x + one, exp(x))
        slope = where_positive(x, one, a) / broadcast(dot(a, one) + 1e-5, a)
        return slope * (dp - along)
    s = sigmoid(x)
    a = x * s
    slope = (s + a * (one - s)) / broadcast(math.sqrt(dot(a, a) + 1e-6), a)
    return slope * (dp - along * p)


@inlined
def _logistic(x):
    return 1 / (1 + math.exp(-x))


@inlined
def _delta_step(before, W, n, kept, r, q, k, error, value, beta, lanes):
    """error = v - before^T k; W = before + k (beta error)^T; returns W^T q. q, k, error: indices of parts of `kept`."""
    error_vector = value - _read(before, (n,), kept, (n, r, k), lanes)
    store(kept, (n, r, error, 0), lanes, error_vector)
    return _write_and_read(
        before, W, n, kept, (n, r, k), broadcast(beta, error_vector) * error_vector, kept, (n, r, q), lanes
    )


@inlined
def _recompute(Ws, t, n, b, reset, saved, kept, k, error, strength, lanes):
    """The memories of the block that ends with step t: Ws[r + 1] after its step r, Ws[0] before the first."""
    first = t - t % BLOCK
    for i in range(len(lanes)):
        for j in range(len(lanes)):
            Ws[0, j, i] = saved[first // BLOCK, n, i, j]
    for r in range(t - first + 1):
        s = first + r
        key = load(kept, (n, s, k, 0), lanes)
        if reset[s, b]:
            for j in range(len(lanes)):
                store(Ws, (r + 1, j, 0), lanes, broadcast(strength[n, s] * kept[n, s, error, j], key) * key)
        else:
            for j in range(len(lanes)):
                before = load(Ws, (r, j, 0), lanes)
                store(Ws, (r + 1, j, 0), lanes, fma(strength[n, s] * kept[n, s, error, j], key, before))


@inlined
def _delta_step_backward(Ws, t, n, new, G, kept, q, k, error, beta, g, dk, lanes):
    """Given g = dL/dy_t, returns the gradients of query, value and write strength; dk receives that of the key."""
    dq = _read(Ws, (t % BLOCK + 1,), g, (), lanes)
    u = _write_and_read(G, G, n, kept, (n, t, q), load(g, (0,), lanes), kept, (n, t, k), lanes)
    error_vector = load(kept, (n, t, error, 0), lanes)
    dv, written = broadcast(beta, u) * u, broadcast(beta, u) * error_vector
    store(dk, (1, 0), lanes, dv)
    for i in range(len(lanes)):  # dk = G written - W dv; G -= k dv^T
        row = load(G, (n, i, 0), lanes)
        dk[0, i] = dot(row, written)
        store(G, (n, i, 0), lanes, fma(-kept[n, t, k, i], dv, row))
    if not new:
        store(dk, (0, 0), lanes, load(dk, (0, 0), lanes) - _read(Ws, (t % BLOCK,), dk, (1,), lanes))
    return dq, dv, dot(u, error_vector)


@compiled
def linear_transformer_forward(x, reset, heads, phi, W0, W, y, kept, strength, saved, lanes, lo, hi):
    """x: [T, N, 3D] query, key, value."""
    D = len(lanes)
    for n in range(lo, hi):
        for t in range(len(x)):
            r = min(t, kept.shape[1] - 1)
            before = _memory_before(t, n, reset[t, n // heads], W0, W, saved, lanes)
            value = load(x, (t, n, 2 * D), lanes)
            store(kept, (n, r, Q, 0), lanes, _phi(phi, load(x, (t, n, 0), lanes)))
            store(kept, (n, r, K, 0), lanes, _phi(phi, load(x, (t, n, D), lanes)))
            store(kept, (n, r, ERROR, 0), lanes, value)
            strength[n, r] = 1
            store(y, (t, n, 0), lanes, _write_and_read(before, W, n, kept, (n, r, K), value, kept, (n, r, Q), lanes))


@compiled
def linear_transformer_backward(x, reset, heads, phi, bptt, kept, strength, saved, g, G, dx, lanes, lo, hi):
    T, D = len(x), len(lanes)
    Ws, dk = np.empty((BLOCK + 1, D, D), x.dtype), np.empty(D, x.dtype)
    for n in range(lo, hi):
        b = n // heads
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _recompute(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
            dq = _read(Ws, (t % BLOCK + 1,), g, (t, n), lanes)
            dv = _write_and_read(G, G, n, kept, (n, t, Q), load(g, (t, n, 0), lanes), kept, (n, t, K), lanes)
            value = load(x, (t, n, 2 * D), lanes)
            for i in range(D):
                dk[i] = dot(load(G, (n, i, 0), lanes), value)
            query, key = load(x, (t, n, 0), lanes), load(x, (t, n, D), lanes)
            store(dx, (t, n, 0), lanes, _phi_backward(phi, query, load(kept, (n, t, Q, 0), lanes), dq))
            store(dx, (t, n, D), lanes, _phi_backward(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0,), lanes)))
            store(dx, (t, n, 2 * D), lanes, dv)
            if reset[t, b] or (bptt and t % bptt == 0):
                _zero(G, n, lanes)


@compiled
def delta_net_forward(x, reset, heads, phi, W0, W, y, kept, strength, saved, lanes, lo, hi):
    """x: [T, N, 3D + 1] query, key, value, write strength before the logistic function."""
    D = len(lanes)
    for n in range(lo, hi):
        for t in range(len(x)):
            r = min(t, kept.shape[1] - 1)
            before = _memory_before(t, n, reset[t, n // heads], W0, W, saved, lanes)
            store(kept, (n, r, Q, 0), lanes, _phi(phi, load(x, (t, n, 0), lanes)))
            store(kept, (n, r, K, 0), lanes, _phi(phi, load(x, (t, n, D), lanes)))
            strength[n, r] = _logistic(x[t, n, 3 * D])
            value = load(x, (t, n, 2 * D), lanes)
            store(y, (t, n, 0), lanes, _delta_step(before, W, n, kept, r, Q, K, ERROR, value, strength[n, r], lanes))


@compiled
def delta_net_backward(x, reset, heads, phi, bptt, kept, strength, saved, g, G, dx, lanes, lo, hi):
    T, D = len(x), len(lanes)
    Ws = np.empty((BLOCK + 1, D, D), x.dtype)
    grad, dk = np.empty(D, x.dtype), np.empty((2, D), x.dtype)
    for n in range(lo, hi):
        b = n // heads
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _recompute(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
            beta, new = strength[n, t], reset[t, b]
            store(grad, (0,), lanes, load(g, (t, n, 0), lanes))
            dq, dv, dbeta = _delta_step_backward(Ws, t, n, new, G, kept, Q, K, ERROR, beta, grad, dk, lanes)
            query, key = load(x, (t, n, 0), lanes), load(x, (t, n, D), lanes)
            store(dx, (t, n, 0), lanes, _phi_backward(phi, query, load(kept, (n, t, Q, 0), lanes), dq))
            store(
                dx, (t, n, D), lanes, _phi_backward(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0, 0), lanes))
            )
            store(dx, (t, n, 2 * D), lanes, dv)
            dx[t, n, 3 * D] = dbeta * beta * (1 - beta)
            if new or (bptt and t % bptt == 0):
                _zero(G, n, lanes)


FEEDBACK, RAW_Q, RAW_K = 3, 4, 5  # more parts of `kept`: u = tanh(y of the last step), query and key before phi


@compiled
def recurrent_delta_net_forward(
    x, Rq, Rk, Rv, rb, reset, heads, phi, W0, W, y_last, y, kept, strength, saved, lanes, lo, hi
):
    """x as for a Delta Net; Rq, Rk, Rv: [H, from, to], rb: [H, D]."""
    D = len(lanes)
    for n in range(lo, hi):
        h = n % heads
        for t in range(len(x)):
            r, new = min(t, kept.shape[1] - 1), reset[t, n // heads]
            before = _memory_before(t, n, new, W0, W, saved, lanes)
            feedback = zeros(x, lanes)
            if not new:
                feedback = tanh(load(y_last, (n, 0), lanes) if t == 0 else load(y, (t - 1, n, 0), lanes))
            store(kept, (n, r, FEEDBACK, 0), lanes, feedback)
            query = load(x, (t, n, 0), lanes) + _read(Rq, (h,), kept, (n, r, FEEDBACK), lanes)
            key = load(x, (t, n, D), lanes) + _read(Rk, (h,), kept, (n, r, FEEDBACK), lanes)
            value = load(x, (t, n, 2 * D), lanes) + _read(Rv, (h,), kept, (n, r, FEEDBACK), lanes)
            strength[n, r] = _logistic(x[t, n, 3 * D] + dot(feedback, load(rb, (h, 0), lanes)))
            if phi != SOFTMAX:  # the backward pass of softmax does not need its input
                store(kept, (n, r, RAW_Q, 0), lanes, query)
                store(kept, (n, r, RAW_K, 0), lanes, key)
            store(kept, (n, r, Q, 0), lanes, _phi(phi, query))
            store(kept, (n, r, K, 0), lanes, _phi(phi, key))
            store(y, (t, n, 0), lanes, _delta_step(before, W, n, kept, r, Q, K, ERROR, value, strength[n, r], lanes))


@compiled
def recurrent_delta_net_backward(
    Rq, Rk, Rv, rb, reset, heads, phi, bptt, kept, strength, saved, g, G, dy, dx, lanes, lo, hi
):
    """Rq, Rk, Rv: [H, to, from]. dy: the gradient of the output before step 0."""
    T, D = len(dx), len(lanes)
    Ws = np.empty((BLOCK + 1, D, D), dx.dtype)
    grad, dk = np.empty(D, dx.dtype), np.empty((2, D), dx.dtype)
    raw_q, raw_k = (Q, K) if phi == SOFTMAX else (RAW_Q, RAW_K)
    for n in range(lo, hi):
        b, h = n // heads, n % heads
        dy_next = zeros(dx, lanes)  # the part of dL/dy_t that comes through step t + 1
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _recompute(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
            beta, new = strength[n, t], reset[t, b]
            store(grad, (0,), lanes, load(g, (t, n, 0), lanes) + dy_next)
            dq, dv, dbeta = _delta_step_backward(Ws, t, n, new, G, kept, Q, K, ERROR, beta, grad, dk, lanes)
            query, key = load(kept, (n, t, raw_q, 0), lanes), load(kept, (n, t, raw_k, 0), lanes)
            dq = _phi_backward(phi, query, load(kept, (n, t, Q, 0), lanes), dq)
            store(dx, (t, n, 0), lanes, dq)
            store(
                dx, (t, n, D), lanes, _phi_backward(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0, 0), lanes))
            )
            store(dx, (t, n, 2 * D), lanes, dv)
            dbeta *= beta * (1 - beta)
            dx[t, n, 3 * D] = dbeta
            if new or (bptt and t % bptt == 0):
                _zero(G, n, lanes)
                dy_next = zeros(dx, lanes)
            else:
                via_q, via_k, via_v = (
                    broadcast(dbeta, dy_next) * load(rb, (h, 0), lanes),
                    zeros(dx, lanes),
                    zeros(dx, lanes),
                )
                for i in range(D):
                    via_q = fma(dx[t, n, i], load(Rq, (h, i, 0), lanes), via_q)
                    via_k = fma(dx[t, n, D + i], load(Rk, (h, i, 0), lanes), via_k)
                    via_v = fma(dx[t, n, 2 * D + i], load(Rv, (h, i, 0), lanes), via_v)
                feedback = load(kept, (n, t, FEEDBACK, 0), lanes)
                dy_next = (via_q + via_k + via_v) * (broadcast(1, feedback) - feedback * feedback)
        store(dy, (n, 0), lanes, dy_next)


PREVIOUS, KEY_2, ERROR_2 = (
    3,
    4,
    5,
)  # more parts of `kept`: softmax of the last output, key and error of the second memory


@compiled
def delta_rnn_forward(
    x, reset, heads, phi, eps, W0, W, R0, R, y_last, y, kept, strength, strength_2, saved, saved_2, lanes, lo, hi
):
    """x: [T, N, 5D + 2] query, key, value, second key, second value, both write strengths."""
    D = len(lanes)
    for n in range(lo, hi):
        for t in range(len(x)):
            r, new = min(t, kept.shape[1] - 1), reset[t, n // heads]
            before = _memory_before(t, n, new, W0, W, saved, lanes)
            before_2 = _memory_before(t, n, new, R0, R, saved_2, lanes)
            previous = zeros(x, lanes)
            if not new:
                previous = load(y_last, (n, 0), lanes) if t == 0 else load(y, (t - 1, n, 0), lanes)
            store(kept, (n, r, Q, 0), lanes, _phi(phi, load(x, (t, n, 0), lanes)))
            store(kept, (n, r, K, 0), lanes, _phi(phi, load(x, (t, n, D), lanes)))
            store(kept, (n, r, KEY_2, 0), lanes, _phi(phi, load(x, (t, n, 3 * D), lanes)))
            store(kept, (n, r, PREVIOUS, 0), lanes, _softmax(previous, eps))
            strength[n, r], strength_2[n, r] = _logistic(x[t, n, 5 * D]), _logistic(x[t, n, 5 * D + 1])
            value, value_2 = load(x, (t, n, 2 * D), lanes), load(x, (t, n, 4 * D), lanes)
            y_t = _delta_step(before, W, n, kept, r, Q, K, ERROR, value, strength[n, r], lanes)
            y_2 = _delta_step(before_2, R, n, kept, r, PREVIOUS, KEY_2, ERROR_2, value_2, strength_2[n, r], lanes)
            store(y, (t, n, 0), lanes, y_t + y_2)


@compiled
def delta_rnn_backward(
    x, reset, heads, phi, bptt, kept, strength, strength_2, saved, saved_2, g, G, G_2, dy, dx, lanes, lo, hi
):
    T, D = len(x), len(lanes)
    Ws, Rs = np.empty((BLOCK + 1, D, D), x.dtype), np.empty((BLOCK + 1, D, D), x.dtype)
    grad, dk = np.empty(D, x.dtype), np.empty((2, D), x.dtype)
    for n in range(lo, hi):
        b = n // heads
        dy_next = zeros(x, lanes)  # the part of dL/dy_t that comes through step t + 1
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _recompute(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
                _recompute(Rs, t, n, b, reset, saved_2, kept, KEY_2, ERROR_2, strength_2, lanes)
            new = reset[t, b]
            store(grad, (0,), lanes, load(g, (t, n, 0), lanes) + dy_next)

            beta = strength[n, t]
            dq, dv, dbeta = _delta_step_backward(Ws, t, n, new, G, kept, Q, K, ERROR, beta, grad, dk, lanes)
            query, key = load(x, (t, n, 0), lanes), load(x, (t, n, D), lanes)
            store(dx, (t, n, 0), lanes, _phi_backward(phi, query, load(kept, (n, t, Q, 0), lanes), dq))
            store(
                dx, (t, n, D), lanes, _phi_backward(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0, 0), lanes))
            )
            store(dx, (t, n, 2 * D), lanes, dv)
            dx[t, n, 5 * D] = dbeta * beta * (1 - beta)

            beta = strength_2[n, t]
            dp, dv, dbeta = _delta_step_backward(
                Rs, t, n, new, G_2, kept, PREVIOUS, KEY_2, ERROR_2, beta, grad, dk, lanes
            )  # fmt: skip
            key, mapped = load(x, (t, n, 3 * D), lanes), load(kept, (n, t, KEY_2, 0), lanes)
            store(dx, (t, n, 3 * D), lanes, _phi_backward(phi, key, mapped, load(dk, (0, 0), lanes)))
            store(dx, (t, n, 4 * D), lanes, dv)
            dx[t, n, 5 * D + 1] = dbeta * beta * (1 - beta)

            if new or (bptt and t % bptt == 0):
                _zero(G, n, lanes)
                _zero(G_2, n, lanes)
                dy_next = zeros(x, lanes)
            else:
                previous = load(kept, (n, t, PREVIOUS, 0), lanes)
                dy_next = _phi_backward(SOFTMAX, previous, previous, dp)
        store(dy, (n, 0), lanes, dy_next)
