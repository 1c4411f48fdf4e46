"""The four rules compiled for the CPU, forward and backward, for some of the streams.

A stream is one head of one batch row: n = b * heads + h. Arrays are contiguous: what arrives and what leaves is
[T, N, ...], memories are [N, D, D] (key by value), resets [T, B]. `kept` is [N, T, parts, D]: what the way back needs
of each row, stream by stream; without a way back it has room for one row only, which is written over. Each function
works through streams lo..hi alone, without the interpreter lock, so that several threads share a call.

The way back goes through a chunk in blocks, from its end. The forward pass leaves the memory at each block's start in
`saved`; from there the block's memories are made again, so nothing is inverted, no rounding builds up, and resets
cost nothing. They are made value by key: then reading them backwards is a sum of rows too. G is the gradient of the
memory, key by value.
"""
# pyright: reportCallIssue=false
# ruff: noqa: RUF005 (compiled code joins tuples, it does not unpack into them)

import math

import numpy as np
from numba import njit

from bestiary.ops.jit import compiler
from bestiary.ops.simd import (
    dot,
    exp,
    fma,
    largest,
    load,
    sigmoid,
    spread,
    store,
    tanh,
    where_positive,
    zeros,
)

BLOCK = 32  # rows whose memories are made again at once: 128 KiB for a head of width 32 in float32
ELU, SOFTMAX, SILU = 0, 1, 2
Q, K, ERROR = 0, 1, 2  # parts of a row: mapped query, mapped key, what the delta rule found missing

compiled = compiler(error_model="numpy")
inlined = njit(nogil=True, error_model="numpy", forceinline=True)


@inlined
def _ask(A, at, x, where, lanes):
    """The sum over i of x[where, i] A[at, i]; in two halves, so that one addition need not wait for the other."""
    D, even, odd = len(lanes), zeros(A, lanes), zeros(A, lanes)
    for i in range(0, D - D % 2, 2):
        even = fma(x[where + (i,)], load(A, at + (i, 0), lanes), even)
        odd = fma(x[where + (i + 1,)], load(A, at + (i + 1, 0), lanes), odd)
    if D % 2:
        even = fma(x[where + (D - 1,)], load(A, at + (D - 1, 0), lanes), even)
    return even + odd


@inlined
def _add_and_ask(before, A, n, x, x_where, row, z, z_where, lanes):
    """A[n] = before[n] + x row^T; the answer is A[n]^T z."""
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
def _clear(A, n, lanes):
    for i in range(len(lanes)):
        store(A, (n, i, 0), lanes, zeros(A, lanes))


@inlined
def _enter(t, n, new, W0, W, saved, lanes):
    """Where the memory before row t lies: noted where a block starts, emptied where an episode does."""
    before = W if t else W0
    if t % BLOCK == 0 and len(saved):
        for i in range(len(lanes)):
            store(saved, (t // BLOCK, n, i, 0), lanes, load(before, (n, i, 0), lanes))
    if new:
        _clear(W, n, lanes)
        before = W
    return before


@inlined
def _softmax(x, eps):
    """Over the sum of its exponentials plus eps; the largest counts as a constant."""
    p = exp(x - spread(largest(x), x))
    return p / spread(dot(p, spread(1, p)) + eps, p)


@inlined
def _map(phi, x):
    if phi == SOFTMAX:
        return _softmax(x, 0.0)
    if phi == ELU:
        a = where_positive(x, x + spread(1, x), exp(x))
        return a / spread(dot(a, spread(1, a)) + 1e-5, a)
    a = x * sigmoid(x)
    return a / spread(math.sqrt(dot(a, a) + 1e-6), a)


@inlined
def _map_back(phi, x, p, dp):
    """From p = phi(x) and its gradient the gradient of x."""
    along = spread(dot(p, dp), p)
    if phi == SOFTMAX:
        return p * (dp - along)
    one = spread(1, x)
    if phi == ELU:
        a = where_positive(x, x + one, exp(x))
        slope = where_positive(x, one, a) / spread(dot(a, one) + 1e-5, a)
        return slope * (dp - along)
    s = sigmoid(x)
    a = x * s
    slope = (s + a * (one - s)) / spread(math.sqrt(dot(a, a) + 1e-6), a)
    return slope * (dp - along * p)


@inlined
def _logistic(x):
    return 1 / (1 + math.exp(-x))


@inlined
def _delta_row(before, W, n, kept, r, q, k, error, value, beta, lanes):
    """error = v - before^T k; W = before + k (beta error)^T; answer W^T q. q, k, error: parts of row r of `kept`."""
    missing = value - _ask(before, (n,), kept, (n, r, k), lanes)
    store(kept, (n, r, error, 0), lanes, missing)
    return _add_and_ask(before, W, n, kept, (n, r, k), spread(beta, missing) * missing, kept, (n, r, q), lanes)


@inlined
def _remake(Ws, t, n, b, reset, saved, kept, k, error, strength, lanes):
    """The memories of the block that ends with row t: Ws[r + 1] after its row r, Ws[0] before the first."""
    first = t - t % BLOCK
    for i in range(len(lanes)):
        for j in range(len(lanes)):
            Ws[0, j, i] = saved[first // BLOCK, n, i, j]
    for r in range(t - first + 1):
        s = first + r
        key = load(kept, (n, s, k, 0), lanes)
        if reset[s, b]:
            for j in range(len(lanes)):
                store(Ws, (r + 1, j, 0), lanes, spread(strength[n, s] * kept[n, s, error, j], key) * key)
        else:
            for j in range(len(lanes)):
                before = load(Ws, (r, j, 0), lanes)
                store(Ws, (r + 1, j, 0), lanes, fma(strength[n, s] * kept[n, s, error, j], key, before))


@inlined
def _delta_row_back(Ws, t, n, new, G, kept, q, k, error, beta, g, dk, lanes):
    """From g, the gradient of the answer, those of query, value and write strength; dk: that of the key."""
    dq = _ask(Ws, (t % BLOCK + 1,), g, (), lanes)
    u = _add_and_ask(G, G, n, kept, (n, t, q), load(g, (0,), lanes), kept, (n, t, k), lanes)
    missing = load(kept, (n, t, error, 0), lanes)
    dv, written = spread(beta, u) * u, spread(beta, u) * missing
    store(dk, (1, 0), lanes, dv)
    for i in range(len(lanes)):  # dk = G written - W dv; G -= k dv^T
        row = load(G, (n, i, 0), lanes)
        dk[0, i] = dot(row, written)
        store(G, (n, i, 0), lanes, fma(-kept[n, t, k, i], dv, row))
    if not new:
        store(dk, (0, 0), lanes, load(dk, (0, 0), lanes) - _ask(Ws, (t % BLOCK,), dk, (1,), lanes))
    return dq, dv, dot(u, missing)


@compiled
def linear_transformer_forward(x, reset, heads, phi, W0, W, y, kept, strength, saved, lanes, lo, hi):
    """x: [T, N, 3D] query, key, value."""
    D = len(lanes)
    for n in range(lo, hi):
        for t in range(len(x)):
            r = min(t, kept.shape[1] - 1)
            before = _enter(t, n, reset[t, n // heads], W0, W, saved, lanes)
            value = load(x, (t, n, 2 * D), lanes)
            store(kept, (n, r, Q, 0), lanes, _map(phi, load(x, (t, n, 0), lanes)))
            store(kept, (n, r, K, 0), lanes, _map(phi, load(x, (t, n, D), lanes)))
            store(kept, (n, r, ERROR, 0), lanes, value)
            strength[n, r] = 1
            store(y, (t, n, 0), lanes, _add_and_ask(before, W, n, kept, (n, r, K), value, kept, (n, r, Q), lanes))


@compiled
def linear_transformer_backward(x, reset, heads, phi, bptt, kept, strength, saved, g, G, dx, lanes, lo, hi):
    T, D = len(x), len(lanes)
    Ws, dk = np.empty((BLOCK + 1, D, D), x.dtype), np.empty(D, x.dtype)
    for n in range(lo, hi):
        b = n // heads
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _remake(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
            dq = _ask(Ws, (t % BLOCK + 1,), g, (t, n), lanes)
            dv = _add_and_ask(G, G, n, kept, (n, t, Q), load(g, (t, n, 0), lanes), kept, (n, t, K), lanes)
            value = load(x, (t, n, 2 * D), lanes)
            for i in range(D):
                dk[i] = dot(load(G, (n, i, 0), lanes), value)
            query, key = load(x, (t, n, 0), lanes), load(x, (t, n, D), lanes)
            store(dx, (t, n, 0), lanes, _map_back(phi, query, load(kept, (n, t, Q, 0), lanes), dq))
            store(dx, (t, n, D), lanes, _map_back(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0,), lanes)))
            store(dx, (t, n, 2 * D), lanes, dv)
            if reset[t, b] or (bptt and t % bptt == 0):
                _clear(G, n, lanes)


@compiled
def delta_net_forward(x, reset, heads, phi, W0, W, y, kept, strength, saved, lanes, lo, hi):
    """x: [T, N, 3D + 1] query, key, value, write strength before the logistic function."""
    D = len(lanes)
    for n in range(lo, hi):
        for t in range(len(x)):
            r = min(t, kept.shape[1] - 1)
            before = _enter(t, n, reset[t, n // heads], W0, W, saved, lanes)
            store(kept, (n, r, Q, 0), lanes, _map(phi, load(x, (t, n, 0), lanes)))
            store(kept, (n, r, K, 0), lanes, _map(phi, load(x, (t, n, D), lanes)))
            strength[n, r] = _logistic(x[t, n, 3 * D])
            value = load(x, (t, n, 2 * D), lanes)
            store(y, (t, n, 0), lanes, _delta_row(before, W, n, kept, r, Q, K, ERROR, value, strength[n, r], lanes))


@compiled
def delta_net_backward(x, reset, heads, phi, bptt, kept, strength, saved, g, G, dx, lanes, lo, hi):
    T, D = len(x), len(lanes)
    Ws = np.empty((BLOCK + 1, D, D), x.dtype)
    grad, dk = np.empty(D, x.dtype), np.empty((2, D), x.dtype)
    for n in range(lo, hi):
        b = n // heads
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _remake(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
            beta, new = strength[n, t], reset[t, b]
            store(grad, (0,), lanes, load(g, (t, n, 0), lanes))
            dq, dv, dbeta = _delta_row_back(Ws, t, n, new, G, kept, Q, K, ERROR, beta, grad, dk, lanes)
            query, key = load(x, (t, n, 0), lanes), load(x, (t, n, D), lanes)
            store(dx, (t, n, 0), lanes, _map_back(phi, query, load(kept, (n, t, Q, 0), lanes), dq))
            store(dx, (t, n, D), lanes, _map_back(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0, 0), lanes)))
            store(dx, (t, n, 2 * D), lanes, dv)
            dx[t, n, 3 * D] = dbeta * beta * (1 - beta)
            if new or (bptt and t % bptt == 0):
                _clear(G, n, lanes)


HEARD, RAW_Q, RAW_K = 3, 4, 5  # parts of a recurrent row: tanh of the previous answer, query and key before their map


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
            before = _enter(t, n, new, W0, W, saved, lanes)
            heard = zeros(x, lanes)
            if not new:
                heard = tanh(load(y_last, (n, 0), lanes) if t == 0 else load(y, (t - 1, n, 0), lanes))
            store(kept, (n, r, HEARD, 0), lanes, heard)
            query = load(x, (t, n, 0), lanes) + _ask(Rq, (h,), kept, (n, r, HEARD), lanes)
            key = load(x, (t, n, D), lanes) + _ask(Rk, (h,), kept, (n, r, HEARD), lanes)
            value = load(x, (t, n, 2 * D), lanes) + _ask(Rv, (h,), kept, (n, r, HEARD), lanes)
            strength[n, r] = _logistic(x[t, n, 3 * D] + dot(heard, load(rb, (h, 0), lanes)))
            if phi != SOFTMAX:  # whose way back does not need them
                store(kept, (n, r, RAW_Q, 0), lanes, query)
                store(kept, (n, r, RAW_K, 0), lanes, key)
            store(kept, (n, r, Q, 0), lanes, _map(phi, query))
            store(kept, (n, r, K, 0), lanes, _map(phi, key))
            store(y, (t, n, 0), lanes, _delta_row(before, W, n, kept, r, Q, K, ERROR, value, strength[n, r], lanes))


@compiled
def recurrent_delta_net_backward(
    Rq, Rk, Rv, rb, reset, heads, phi, bptt, kept, strength, saved, g, G, dy, dx, lanes, lo, hi
):
    """Rq, Rk, Rv: [H, to, from]. dy: the gradient of the answer before row 0."""
    T, D = len(dx), len(lanes)
    Ws = np.empty((BLOCK + 1, D, D), dx.dtype)
    grad, dk = np.empty(D, dx.dtype), np.empty((2, D), dx.dtype)
    raw_q, raw_k = (Q, K) if phi == SOFTMAX else (RAW_Q, RAW_K)
    for n in range(lo, hi):
        b, h = n // heads, n % heads
        later = zeros(dx, lanes)  # what the next row adds to the gradient of this answer
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _remake(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
            beta, new = strength[n, t], reset[t, b]
            store(grad, (0,), lanes, load(g, (t, n, 0), lanes) + later)
            dq, dv, dbeta = _delta_row_back(Ws, t, n, new, G, kept, Q, K, ERROR, beta, grad, dk, lanes)
            query, key = load(kept, (n, t, raw_q, 0), lanes), load(kept, (n, t, raw_k, 0), lanes)
            dq = _map_back(phi, query, load(kept, (n, t, Q, 0), lanes), dq)
            store(dx, (t, n, 0), lanes, dq)
            store(dx, (t, n, D), lanes, _map_back(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0, 0), lanes)))
            store(dx, (t, n, 2 * D), lanes, dv)
            dbeta *= beta * (1 - beta)
            dx[t, n, 3 * D] = dbeta
            if new or (bptt and t % bptt == 0):
                _clear(G, n, lanes)
                later = zeros(dx, lanes)
            else:
                via_q, via_k, via_v = spread(dbeta, later) * load(rb, (h, 0), lanes), zeros(dx, lanes), zeros(dx, lanes)
                for i in range(D):
                    via_q = fma(dx[t, n, i], load(Rq, (h, i, 0), lanes), via_q)
                    via_k = fma(dx[t, n, D + i], load(Rk, (h, i, 0), lanes), via_k)
                    via_v = fma(dx[t, n, 2 * D + i], load(Rv, (h, i, 0), lanes), via_v)
                heard = load(kept, (n, t, HEARD, 0), lanes)
                later = (via_q + via_k + via_v) * (spread(1, heard) - heard * heard)
        store(dy, (n, 0), lanes, later)


PREVIOUS, KEY_2, ERROR_2 = 3, 4, 5  # parts of a Delta RNN's row: softmax of the previous answer, the second memory's


@compiled
def delta_rnn_forward(
    x, reset, heads, phi, eps, W0, W, R0, R, y_last, y, kept, strength, strength_2, saved, saved_2, lanes, lo, hi
):
    """x: [T, N, 5D + 2] query, key, value, second key, second value, both write strengths."""
    D = len(lanes)
    for n in range(lo, hi):
        for t in range(len(x)):
            r, new = min(t, kept.shape[1] - 1), reset[t, n // heads]
            before = _enter(t, n, new, W0, W, saved, lanes)
            before_2 = _enter(t, n, new, R0, R, saved_2, lanes)
            previous = zeros(x, lanes)
            if not new:
                previous = load(y_last, (n, 0), lanes) if t == 0 else load(y, (t - 1, n, 0), lanes)
            store(kept, (n, r, Q, 0), lanes, _map(phi, load(x, (t, n, 0), lanes)))
            store(kept, (n, r, K, 0), lanes, _map(phi, load(x, (t, n, D), lanes)))
            store(kept, (n, r, KEY_2, 0), lanes, _map(phi, load(x, (t, n, 3 * D), lanes)))
            store(kept, (n, r, PREVIOUS, 0), lanes, _softmax(previous, eps))
            strength[n, r], strength_2[n, r] = _logistic(x[t, n, 5 * D]), _logistic(x[t, n, 5 * D + 1])
            value, value_2 = load(x, (t, n, 2 * D), lanes), load(x, (t, n, 4 * D), lanes)
            answer = _delta_row(before, W, n, kept, r, Q, K, ERROR, value, strength[n, r], lanes)
            second = _delta_row(before_2, R, n, kept, r, PREVIOUS, KEY_2, ERROR_2, value_2, strength_2[n, r], lanes)
            store(y, (t, n, 0), lanes, answer + second)


@compiled
def delta_rnn_backward(
    x, reset, heads, phi, bptt, kept, strength, strength_2, saved, saved_2, g, G, G_2, dy, dx, lanes, lo, hi
):
    T, D = len(x), len(lanes)
    Ws, Rs = np.empty((BLOCK + 1, D, D), x.dtype), np.empty((BLOCK + 1, D, D), x.dtype)
    grad, dk = np.empty(D, x.dtype), np.empty((2, D), x.dtype)
    for n in range(lo, hi):
        b = n // heads
        later = zeros(x, lanes)  # what the next row adds to the gradient of this answer
        for t in range(T - 1, -1, -1):
            if t == T - 1 or t % BLOCK == BLOCK - 1:
                _remake(Ws, t, n, b, reset, saved, kept, K, ERROR, strength, lanes)
                _remake(Rs, t, n, b, reset, saved_2, kept, KEY_2, ERROR_2, strength_2, lanes)
            new = reset[t, b]
            store(grad, (0,), lanes, load(g, (t, n, 0), lanes) + later)

            beta = strength[n, t]
            dq, dv, dbeta = _delta_row_back(Ws, t, n, new, G, kept, Q, K, ERROR, beta, grad, dk, lanes)
            query, key = load(x, (t, n, 0), lanes), load(x, (t, n, D), lanes)
            store(dx, (t, n, 0), lanes, _map_back(phi, query, load(kept, (n, t, Q, 0), lanes), dq))
            store(dx, (t, n, D), lanes, _map_back(phi, key, load(kept, (n, t, K, 0), lanes), load(dk, (0, 0), lanes)))
            store(dx, (t, n, 2 * D), lanes, dv)
            dx[t, n, 5 * D] = dbeta * beta * (1 - beta)

            beta = strength_2[n, t]
            dp, dv, dbeta = _delta_row_back(
                Rs, t, n, new, G_2, kept, PREVIOUS, KEY_2, ERROR_2, beta, grad, dk, lanes
            )  # fmt: skip
            key, mapped = load(x, (t, n, 3 * D), lanes), load(kept, (n, t, KEY_2, 0), lanes)
            store(dx, (t, n, 3 * D), lanes, _map_back(phi, key, mapped, load(dk, (0, 0), lanes)))
            store(dx, (t, n, 4 * D), lanes, dv)
            dx[t, n, 5 * D + 1] = dbeta * beta * (1 - beta)

            if new or (bptt and t % bptt == 0):
                _clear(G, n, lanes)
                _clear(G_2, n, lanes)
                later = zeros(x, lanes)
            else:
                previous = load(kept, (n, t, PREVIOUS, 0), lanes)
                later = _map_back(SOFTMAX, previous, previous, dp)
        store(dy, (n, 0), lanes, later)
