"""The interpreter of compiled acting: runs the instructions of a `Program` without PyTorch."""
# pyright: standard, reportCallIssue=false

import numpy as np

from bestiary.ops.counts import count, rarity
from bestiary.ops.jit import compiler
from bestiary.ops.program import (
    ADD,
    CONVOLUTION,
    COPY,
    DELTA_NET,
    DELTA_RNN,
    GRU,
    LINEAR,
    LINEAR_TRANSFORMER,
    LSTM,
    NORM,
    RECURRENT_DELTA_NET,
)
from bestiary.ops.simd import fma, load, store

compiled = compiler(error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})

LANES = (0,) * 8  # a SIMD vector of 8 lanes


@compiled
def _linear(y, x, rows, columns, w, b, scratch, weights):
    for j in range(columns):
        scratch[y + j] = 0.0 if b < 0 else weights[b + j]
    _accumulate(y, x, rows, columns, w, scratch, weights)


@compiled
def _accumulate(y, x, rows, columns, w, scratch, weights):
    """scratch[y] += scratch[x] W; the partial sums of four vectors stay in registers."""
    wide = columns - columns % 32
    for j in range(0, wide, 32):
        s0, s1 = load(scratch, (y + j,), LANES), load(scratch, (y + j + 8,), LANES)
        s2, s3 = load(scratch, (y + j + 16,), LANES), load(scratch, (y + j + 24,), LANES)
        for i in range(rows):
            factor, at = scratch[x + i], w + i * columns + j
            s0 = fma(factor, load(weights, (at,), LANES), s0)
            s1 = fma(factor, load(weights, (at + 8,), LANES), s1)
            s2 = fma(factor, load(weights, (at + 16,), LANES), s2)
            s3 = fma(factor, load(weights, (at + 24,), LANES), s3)
        store(scratch, (y + j,), LANES, s0)
        store(scratch, (y + j + 8,), LANES, s1)
        store(scratch, (y + j + 16,), LANES, s2)
        store(scratch, (y + j + 24,), LANES, s3)
    narrow = columns - columns % 8
    for j in range(wide, narrow, 8):
        s0 = load(scratch, (y + j,), LANES)
        for i in range(rows):
            s0 = fma(scratch[x + i], load(weights, (w + i * columns + j,), LANES), s0)
        store(scratch, (y + j,), LANES, s0)
    for j in range(narrow, columns):
        total = scratch[y + j]
        for i in range(rows):
            total += scratch[x + i] * weights[w + i * columns + j]
        scratch[y + j] = total


@compiled
def _convolution(y, x, channels, height, width, out, k, w, channel, pixel, scratch, weights):
    rows, columns = height - k + 1, width - k + 1
    bias = w + k * k * channels * out
    for pixel_out in range(rows * columns):
        to = y + pixel_out * out
        for o in range(out):
            scratch[to + o] = weights[bias + o]
        top, left = pixel_out // columns, pixel_out % columns
        for i in range(k):
            for j in range(k):
                at = x + ((top + i) * width + left + j) * pixel
                for c in range(channels):
                    factor = scratch[at + c * channel]
                    row = w + ((i * k + j) * channels + c) * out
                    for o in range(out):
                        scratch[to + o] += factor * weights[row + o]
        for o in range(out):
            scratch[to + o] = max(scratch[to + o], np.float32(0))


@compiled
def _norm(y, x, n, w, scratch, weights):
    mean = np.float32(0)
    for j in range(n):
        mean += scratch[x + j]
    mean /= n
    variance = np.float32(0)
    for j in range(n):
        variance += (scratch[x + j] - mean) ** 2
    scale = np.float32(1) / np.sqrt(variance / n + np.float32(1e-5))
    for j in range(n):
        scratch[y + j] = (scratch[x + j] - mean) * scale * weights[w + j] + weights[w + n + j]


@compiled
def _logistic(x):
    return np.float32(1) / (np.float32(1) + np.exp(-x))


@compiled
def _lstm(y, x, n, hidden, w, h, c, scratch, weights, memory):
    """Gates (input, forget, cell, output) are in scratch behind the output y. h, c: addresses in the state."""
    gates = y + hidden
    bias = w + (n + hidden) * 4 * hidden
    _linear(gates, x, n, 4 * hidden, w, bias, scratch, weights)
    out = scratch[gates : gates + 4 * hidden]
    for i in range(hidden):
        row = weights[w + (n + i) * 4 * hidden : w + (n + i + 1) * 4 * hidden]
        factor = memory[h + i]
        for j in range(4 * hidden):
            out[j] += factor * row[j]
    for j in range(hidden):
        write, keep, new = _logistic(out[j]), _logistic(out[hidden + j]), np.tanh(out[2 * hidden + j])
        memory[c + j] = keep * memory[c + j] + write * new
        scratch[y + j] = _logistic(out[3 * hidden + j]) * np.tanh(memory[c + j])
    for j in range(hidden):
        memory[h + j] = scratch[y + j]


@compiled
def _gru(y, x, n, hidden, w, m, scratch, weights, memory):
    """Gates reset, update, new: W x + b and U h + b' are kept apart, as in PyTorch. m: address of h in the state."""
    from_input, from_state = y + hidden, y + 4 * hidden
    bias = w + (n + hidden) * 3 * hidden
    _linear(from_input, x, n, 3 * hidden, w, bias, scratch, weights)
    out = scratch[from_state : from_state + 3 * hidden]
    for j in range(3 * hidden):
        out[j] = weights[bias + 3 * hidden + j]
    for i in range(hidden):
        row = weights[w + (n + i) * 3 * hidden : w + (n + i + 1) * 3 * hidden]
        factor = memory[m + i]
        for j in range(3 * hidden):
            out[j] += factor * row[j]
    for j in range(hidden):
        reset = _logistic(scratch[from_input + j] + out[j])
        update = _logistic(scratch[from_input + hidden + j] + out[hidden + j])
        new = np.tanh(scratch[from_input + 2 * hidden + j] + reset * out[2 * hidden + j])
        scratch[y + j] = (1 - update) * new + update * memory[m + j]
    for j in range(hidden):
        memory[m + j] = scratch[y + j]


@compiled
def _phi(phi, x, n, scratch):
    """The feature map phi, in place (see `loops.feature_map`)."""
    total = np.float32(0)
    if phi == 1:
        top = scratch[x]
        for j in range(n):
            top = max(top, scratch[x + j])
        for j in range(n):
            scratch[x + j] = np.exp(scratch[x + j] - top)
            total += scratch[x + j]
        scale = np.float32(1) / total
    elif phi == 0:
        for j in range(n):
            v = scratch[x + j]
            scratch[x + j] = v + 1 if v > 0 else np.exp(v)
            total += scratch[x + j]
        scale = np.float32(1) / (total + np.float32(1e-5))
    else:
        for j in range(n):
            scratch[x + j] *= _logistic(scratch[x + j])
            total += scratch[x + j] ** 2
        scale = np.float32(1) / np.sqrt(total + np.float32(1e-6))
    for j in range(n):
        scratch[x + j] *= scale


@compiled
def _delta(y, q, k, v, beta, n, m, scratch, memory):
    """W += beta k (v - W^T k)^T, then y += W^T q; v becomes the error v - W^T k. memory[m]: W [key, value]."""
    for i in range(n):
        factor = scratch[k + i]
        row = memory[m + i * n : m + (i + 1) * n]
        for j in range(n):
            scratch[v + j] -= factor * row[j]
    for i in range(n):
        factor, query = beta * scratch[k + i], scratch[q + i]
        row = memory[m + i * n : m + (i + 1) * n]
        for j in range(n):
            row[j] += factor * scratch[v + j]
            scratch[y + j] += query * row[j]


@compiled
def _fast_weights(y, x, heads, n, rule, phi, w, m, scratch, weights, memory):
    """A step of a fast-weight rule, per head. scratch[x]: output of the slow network; memory[m]: its state."""
    square = n * n
    columns = 3 * n if rule == LINEAR_TRANSFORMER else 5 * n + 2 if rule == DELTA_RNN else 3 * n + 1
    spare = y + heads * n  # n numbers behind the output
    for h in range(heads):
        out, q, k, v = y + h * n, x + h * columns, x + h * columns + n, x + h * columns + 2 * n
        W = m + h * square
        for j in range(n):
            scratch[out + j] = 0
        if rule == LINEAR_TRANSFORMER:
            _phi(phi, q, n, scratch)
            _phi(phi, k, n, scratch)
            for i in range(n):
                for j in range(n):
                    memory[W + i * n + j] += scratch[k + i] * scratch[v + j]
                    scratch[out + j] += scratch[q + i] * memory[W + i * n + j]
        elif rule == DELTA_NET:
            _phi(phi, q, n, scratch)
            _phi(phi, k, n, scratch)
            _delta(out, q, k, v, _logistic(scratch[x + h * columns + 3 * n]), n, W, scratch, memory)
        elif rule == RECURRENT_DELTA_NET:
            last = m + heads * square + h * n
            strength = scratch[x + h * columns + 3 * n]
            for i in range(n):
                scratch[spare + i] = np.tanh(memory[last + i])
                strength += scratch[spare + i] * weights[w + 3 * heads * square + h * n + i]
            for part in range(3):
                _accumulate(q + part * n, spare, n, n, w + (part * heads + h) * square, scratch, weights)
            _phi(phi, q, n, scratch)
            _phi(phi, k, n, scratch)
            _delta(out, q, k, v, _logistic(strength), n, W, scratch, memory)
            for j in range(n):
                memory[last + j] = scratch[out + j]
        else:
            R, last = m + (heads + h) * square, m + 2 * heads * square + h * n
            k2, v2, strengths = q + 3 * n, q + 4 * n, q + 5 * n
            for j in range(n):
                scratch[spare + j] = memory[last + j]
            top = scratch[spare]
            for j in range(n):
                top = max(top, scratch[spare + j])
            total = np.float32(0)
            for j in range(n):
                scratch[spare + j] = np.exp(scratch[spare + j] - top)
                total += scratch[spare + j]
            for j in range(n):
                scratch[spare + j] /= total + np.float32(1e-6)
            for part in (q, k, k2):
                _phi(phi, part, n, scratch)
            _delta(out, q, k, v, _logistic(scratch[strengths]), n, W, scratch, memory)
            _delta(out, spare, k2, v2, _logistic(scratch[strengths + 1]), n, R, scratch, memory)
            for j in range(n):
                memory[last + j] = scratch[out + j]


@compiled
def run(code, scratch, weights, memory):
    """One step of one environment."""
    for i in range(len(code)):
        op, y, x = code[i, 0], code[i, 1], code[i, 2]
        if op == LINEAR:
            n = code[i, 4]
            _linear(y, x, code[i, 3], n, code[i, 5], code[i, 6], scratch, weights)
            if code[i, 7]:
                for j in range(n):
                    scratch[y + j] = max(scratch[y + j], np.float32(0))
        elif op == CONVOLUTION:
            _convolution(
                y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], code[i, 7], code[i, 8], code[i, 9], code[i, 10],
                scratch, weights,
            )  # fmt: skip
        elif op == NORM:
            _norm(y, x, code[i, 3], code[i, 4], scratch, weights)
        elif op == ADD:
            for j in range(code[i, 3]):
                scratch[y + j] += scratch[x + j]
        elif op == COPY:
            for j in range(code[i, 3]):
                scratch[y + j] = scratch[x + j]
        elif op == LSTM:
            _lstm(y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], code[i, 7], scratch, weights, memory)
        elif op == GRU:
            _gru(y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], scratch, weights, memory)
        else:
            _fast_weights(
                y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], code[i, 7], code[i, 8], scratch, weights, memory
            )  # fmt: skip


@compiled
def act(
    code, weights, scratch, memory, obs, scale, reward, is_first, prev_action, output, output_at, noise, epsilon,
    counts, count_epsilon, hash_keys, samples, action,
):  # fmt: skip
    """One step of every environment: obs [B, n], memory [B, numbers] -> output [B, A], action [B].

    With `samples` the output holds logits, and actions are chosen as by `policy.sample` with exponential noise [B, A].
    Else the output holds Q, and actions are chosen as by `policy.epsilon_greedy` with uniform noise [2, B] and epsilon
    [B]; where there are counts, epsilon is at least count_epsilon * min(1, episodes / visits).
    """
    n, actions = obs.shape[1], output.shape[1]
    one_hot = scratch[n + 1 : n + 1 + actions]
    for b in range(len(obs)):
        if is_first[b]:
            memory[b, :] = 0
        for j in range(n):
            scratch[j] = obs[b, j] * scale
        scratch[n] = min(max(np.float32(reward[b]), np.float32(-1)), np.float32(1))
        one_hot[:] = 0
        if not is_first[b]:
            one_hot[prev_action[b]] = 1
        run(code, scratch, weights, memory[b])
        for a in range(actions):
            output[b, a] = scratch[output_at + a]
    if len(counts):
        count(counts, hash_keys, obs, prev_action, is_first)
    for b in range(len(obs)):
        best = np.argmax(output[b])
        if samples:
            best = np.argmax(output[b] - np.log(noise[b]))
        else:
            epsilon_b = epsilon[b]
            if len(counts):
                rare = rarity(counts, hash_keys, obs[b], prev_action[b], is_first[b])
                epsilon_b = max(epsilon_b, np.float32(count_epsilon * rare))
            if noise[1, b] < epsilon_b:
                best = np.int64(noise[0, b] * np.float32(actions))
        action[b] = best
