"""Small networks as a list of instructions, run row by row in compiled code.

An ordinary step of acting is a few dozen calls into PyTorch, each of which costs more than the arithmetic of a small
network. A tape is the same network written down once: where to read, where to write, which weights. Modules write
themselves (`to_tape(tape, x) -> where the result is`); one that cannot returns None, and acting stays with PyTorch.

Everything a row needs lies in one array of numbers, `desk`; memory is one array per environment, its leaves side by
side; weights are one array, filled anew whenever they change.
"""
# pyright: reportCallIssue=false

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bestiary.compiling import compiler
from bestiary.counting import count, rarity
from bestiary.ops.fastweights.loops import RULES
from bestiary.ops.rows import fma, load, store
from bestiary.types import Spec, State

compiled = compiler(error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})

LINEAR, CONVOLUTION, NORM, ADD, COPY, LSTM, GRU, FAST = range(8)
LINEAR_TRANSFORMER, DELTA_NET, RECURRENT_DELTA_NET, DELTA_RNN = range(len(RULES))
PHI = {"elu": 0, "softmax": 1, "silu": 2}
LANES = (0,) * 8  # numbers of a vector
WORDS = 12  # numbers per instruction


class Tape:
    """What a row shows lies at the start of the desk: the observation, the reward, the previous action one-hot."""

    def __init__(self, spec: Spec) -> None:
        self.code: list[tuple[int, ...]] = []
        self.sources: list[Callable[[], Tensor]] = []
        self.weight_count = self.desk_size = self.memory_size = 0
        self.obs, self.reward, self.action = (self.room(n) for n in (math.prod(spec.obs_shape), 1, spec.num_actions))

    # -- writing -------------------------------------------------------------------------------------

    def room(self, size: int) -> int:
        """Fresh space on the desk."""
        self.desk_size += size
        return self.desk_size - size

    def weights(self, *sources: Callable[[], Tensor]) -> int:
        """Where these tensors will lie, one after the other; they are asked for again at every `load`."""
        start = self.weight_count
        self.sources += sources
        self.weight_count += sum(source().numel() for source in sources)
        return start

    def memory(self, size: int) -> int:
        """Space that lasts from row to row; in the order of the leaves of the core's state."""
        self.memory_size += size
        return self.memory_size - size

    def instruct(self, *words: int) -> None:
        self.code.append(words + (0,) * (WORDS - len(words)))

    def linear(self, layer: nn.Linear, x: int, relu: bool = False, channels: int | None = None) -> int:
        """`channels`: of a picture x whose channels lie last, where the layer was made for channels first."""
        y = self.room(layer.out_features)
        w = self.weights(lambda: layer.weight.t().unflatten(0, (channels or 1, -1)).transpose(0, 1))
        b = -1 if layer.bias is None else self.weights(lambda: layer.bias)
        self.instruct(LINEAR, y, x, layer.in_features, layer.out_features, w, b, relu)
        return y

    def layers(self, layers: nn.Sequential, x: int) -> int:
        """Linear layers with ReLU between them."""
        *inner, last = (layer for layer in layers if isinstance(layer, nn.Linear))
        for layer in inner:
            x = self.linear(layer, x, relu=True)
        return self.linear(last, x)

    def matrix(self, source: Callable[[], Tensor], x: int) -> int:
        """A product with numbers that are not a layer's: [outputs, inputs]."""
        outputs, inputs = source().shape
        y, w = self.room(outputs), self.weights(lambda: source().t())
        self.instruct(LINEAR, y, x, inputs, outputs, w, -1, False)
        return y

    def convolution(self, layer: nn.Conv2d, x: int, height: int, width: int, channels_last: bool) -> int:
        """With ReLU and a stride of 1; what comes out has its channels last."""
        k, channels = layer.kernel_size[0], layer.in_channels
        y = self.room((height - k + 1) * (width - k + 1) * layer.out_channels)
        w = self.weights(lambda: layer.weight.permute(2, 3, 1, 0), lambda: layer.bias)  # type: ignore
        strides = (1, channels) if channels_last else (height * width, 1)  # from channel to channel, pixel to pixel
        self.instruct(CONVOLUTION, y, x, channels, height, width, layer.out_channels, k, w, *strides)
        return y

    def copy(self, x: int, n: int, to: int) -> None:
        self.instruct(COPY, to, x, n)

    def norm(self, layer: nn.LayerNorm, x: int) -> int:
        n = layer.weight.numel()
        y = self.room(n)
        self.instruct(NORM, y, x, n, self.weights(lambda: layer.weight, lambda: layer.bias))
        return y

    def add(self, y: int, x: int, n: int) -> None:
        self.instruct(ADD, y, x, n)

    # -- running -------------------------------------------------------------------------------------

    def finish(self) -> NDArray[np.int64]:
        return np.array(self.code, np.int64).reshape(-1, WORDS)

    def load(self) -> NDArray[np.float32]:
        parts = [source().detach().to("cpu", torch.float32).reshape(-1) for source in self.sources]
        return torch.cat(parts).numpy() if parts else np.zeros(0, np.float32)


def flatten(state: State, batch_size: int) -> NDArray[np.float32]:
    """Memory as [B, numbers]."""
    if not state:
        return np.zeros((batch_size, 0), np.float32)
    return torch.cat([leaf.reshape(batch_size, -1) for leaf in state], 1).numpy().copy()


def unflatten(memory: NDArray[np.float32], like: State) -> State:
    parts = torch.from_numpy(memory.copy()).split([leaf[0].numel() for leaf in like], 1)
    return tuple(part.reshape(leaf.shape) for part, leaf in zip(parts, like, strict=True))


@compiled
def _linear(y, x, rows, columns, w, b, desk, weights):
    for j in range(columns):
        desk[y + j] = 0.0 if b < 0 else weights[b + j]
    _accumulate(y, x, rows, columns, w, desk, weights)


@compiled
def _accumulate(y, x, rows, columns, w, desk, weights):
    """desk[y] += desk[x] W: sums of a few vectors stay in registers while the rows of W pass by."""
    wide = columns - columns % 32
    for j in range(0, wide, 32):
        s0, s1 = load(desk, (y + j,), LANES), load(desk, (y + j + 8,), LANES)
        s2, s3 = load(desk, (y + j + 16,), LANES), load(desk, (y + j + 24,), LANES)
        for i in range(rows):
            factor, at = desk[x + i], w + i * columns + j
            s0 = fma(factor, load(weights, (at,), LANES), s0)
            s1 = fma(factor, load(weights, (at + 8,), LANES), s1)
            s2 = fma(factor, load(weights, (at + 16,), LANES), s2)
            s3 = fma(factor, load(weights, (at + 24,), LANES), s3)
        store(desk, (y + j,), LANES, s0)
        store(desk, (y + j + 8,), LANES, s1)
        store(desk, (y + j + 16,), LANES, s2)
        store(desk, (y + j + 24,), LANES, s3)
    narrow = columns - columns % 8
    for j in range(wide, narrow, 8):
        s0 = load(desk, (y + j,), LANES)
        for i in range(rows):
            s0 = fma(desk[x + i], load(weights, (w + i * columns + j,), LANES), s0)
        store(desk, (y + j,), LANES, s0)
    for j in range(narrow, columns):
        total = desk[y + j]
        for i in range(rows):
            total += desk[x + i] * weights[w + i * columns + j]
        desk[y + j] = total


@compiled
def _convolution(y, x, channels, height, width, out, k, w, channel, pixel, desk, weights):
    rows, columns = height - k + 1, width - k + 1
    bias = w + k * k * channels * out
    for spot in range(rows * columns):
        to = y + spot * out
        for o in range(out):
            desk[to + o] = weights[bias + o]
        top, left = spot // columns, spot % columns
        for i in range(k):
            for j in range(k):
                at = x + ((top + i) * width + left + j) * pixel
                for c in range(channels):
                    factor = desk[at + c * channel]
                    row = w + ((i * k + j) * channels + c) * out
                    for o in range(out):
                        desk[to + o] += factor * weights[row + o]
        for o in range(out):
            desk[to + o] = max(desk[to + o], np.float32(0))


@compiled
def _norm(y, x, n, w, desk, weights):
    mean = np.float32(0)
    for j in range(n):
        mean += desk[x + j]
    mean /= n
    spread = np.float32(0)
    for j in range(n):
        spread += (desk[x + j] - mean) ** 2
    scale = np.float32(1) / np.sqrt(spread / n + np.float32(1e-5))
    for j in range(n):
        desk[y + j] = (desk[x + j] - mean) * scale * weights[w + j] + weights[w + n + j]


@compiled
def _logistic(x):
    return np.float32(1) / (np.float32(1) + np.exp(-x))


@compiled
def _lstm(y, x, n, hidden, w, h, c, desk, weights, memory):
    """Gates on the desk behind the output: input, forget, cell, output. h, c: where memory has them."""
    gates = y + hidden
    bias = w + (n + hidden) * 4 * hidden
    _linear(gates, x, n, 4 * hidden, w, bias, desk, weights)
    out = desk[gates : gates + 4 * hidden]
    for i in range(hidden):
        row = weights[w + (n + i) * 4 * hidden : w + (n + i + 1) * 4 * hidden]
        factor = memory[h + i]
        for j in range(4 * hidden):
            out[j] += factor * row[j]
    for j in range(hidden):
        write, keep, new = _logistic(out[j]), _logistic(out[hidden + j]), np.tanh(out[2 * hidden + j])
        memory[c + j] = keep * memory[c + j] + write * new
        desk[y + j] = _logistic(out[3 * hidden + j]) * np.tanh(memory[c + j])
    for j in range(hidden):
        memory[h + j] = desk[y + j]


@compiled
def _gru(y, x, n, hidden, w, m, desk, weights, memory):
    """From the input and from itself apart: reset, update, new. PyTorch's biases: one for each side."""
    ours, theirs = y + hidden, y + 4 * hidden
    bias = w + (n + hidden) * 3 * hidden
    _linear(ours, x, n, 3 * hidden, w, bias, desk, weights)
    out = desk[theirs : theirs + 3 * hidden]
    for j in range(3 * hidden):
        out[j] = weights[bias + 3 * hidden + j]
    for i in range(hidden):
        row = weights[w + (n + i) * 3 * hidden : w + (n + i + 1) * 3 * hidden]
        factor = memory[m + i]
        for j in range(3 * hidden):
            out[j] += factor * row[j]
    for j in range(hidden):
        reset = _logistic(desk[ours + j] + out[j])
        update = _logistic(desk[ours + hidden + j] + out[hidden + j])
        new = np.tanh(desk[ours + 2 * hidden + j] + reset * out[2 * hidden + j])
        desk[y + j] = (1 - update) * new + update * memory[m + j]
    for j in range(hidden):
        memory[m + j] = desk[y + j]


@compiled
def _map(phi, x, n, desk):
    """In place, as `feature_map` does."""
    total = np.float32(0)
    if phi == 1:
        top = desk[x]
        for j in range(n):
            top = max(top, desk[x + j])
        for j in range(n):
            desk[x + j] = np.exp(desk[x + j] - top)
            total += desk[x + j]
        scale = np.float32(1) / total
    elif phi == 0:
        for j in range(n):
            v = desk[x + j]
            desk[x + j] = v + 1 if v > 0 else np.exp(v)
            total += desk[x + j]
        scale = np.float32(1) / (total + np.float32(1e-5))
    else:
        for j in range(n):
            desk[x + j] *= _logistic(desk[x + j])
            total += desk[x + j] ** 2
        scale = np.float32(1) / np.sqrt(total + np.float32(1e-6))
    for j in range(n):
        desk[x + j] *= scale


@compiled
def _delta(y, q, k, v, beta, n, m, desk, memory):
    """y += W^T q after W += beta k (v - W^T k)^T; v is left as what was missing. memory[m]: [key, value]."""
    for i in range(n):
        factor = desk[k + i]
        row = memory[m + i * n : m + (i + 1) * n]
        for j in range(n):
            desk[v + j] -= factor * row[j]
    for i in range(n):
        factor, wanted = beta * desk[k + i], desk[q + i]
        row = memory[m + i * n : m + (i + 1) * n]
        for j in range(n):
            row[j] += factor * desk[v + j]
            desk[y + j] += wanted * row[j]


@compiled
def _fast(y, x, heads, n, rule, phi, w, m, desk, weights, memory):
    """A row of a fast-weight rule, head by head; desk[x]: what each asks and tells. memory: the rule's leaves."""
    square = n * n
    columns = 3 * n if rule == LINEAR_TRANSFORMER else 5 * n + 2 if rule == DELTA_RNN else 3 * n + 1
    spare = y + heads * n  # one row behind the output
    for h in range(heads):
        out, q, k, v = y + h * n, x + h * columns, x + h * columns + n, x + h * columns + 2 * n
        W = m + h * square
        for j in range(n):
            desk[out + j] = 0
        if rule == LINEAR_TRANSFORMER:
            _map(phi, q, n, desk)
            _map(phi, k, n, desk)
            for i in range(n):
                for j in range(n):
                    memory[W + i * n + j] += desk[k + i] * desk[v + j]
                    desk[out + j] += desk[q + i] * memory[W + i * n + j]
        elif rule == DELTA_NET:
            _map(phi, q, n, desk)
            _map(phi, k, n, desk)
            _delta(out, q, k, v, _logistic(desk[x + h * columns + 3 * n]), n, W, desk, memory)
        elif rule == RECURRENT_DELTA_NET:
            last = m + heads * square + h * n
            strength = desk[x + h * columns + 3 * n]
            for i in range(n):
                desk[spare + i] = np.tanh(memory[last + i])
                strength += desk[spare + i] * weights[w + 3 * heads * square + h * n + i]
            for part in range(3):
                _accumulate(q + part * n, spare, n, n, w + (part * heads + h) * square, desk, weights)
            _map(phi, q, n, desk)
            _map(phi, k, n, desk)
            _delta(out, q, k, v, _logistic(strength), n, W, desk, memory)
            for j in range(n):
                memory[last + j] = desk[out + j]
        else:
            R, last = m + (heads + h) * square, m + 2 * heads * square + h * n
            k2, v2, strengths = q + 3 * n, q + 4 * n, q + 5 * n
            for j in range(n):
                desk[spare + j] = memory[last + j]
            top = desk[spare]
            for j in range(n):
                top = max(top, desk[spare + j])
            total = np.float32(0)
            for j in range(n):
                desk[spare + j] = np.exp(desk[spare + j] - top)
                total += desk[spare + j]
            for j in range(n):
                desk[spare + j] /= total + np.float32(1e-6)
            for part in (q, k, k2):
                _map(phi, part, n, desk)
            _delta(out, q, k, v, _logistic(desk[strengths]), n, W, desk, memory)
            _delta(out, spare, k2, v2, _logistic(desk[strengths + 1]), n, R, desk, memory)
            for j in range(n):
                memory[last + j] = desk[out + j]


@compiled
def run(code, desk, weights, memory):
    """One row of one environment."""
    for i in range(len(code)):
        op, y, x = code[i, 0], code[i, 1], code[i, 2]
        if op == LINEAR:
            n = code[i, 4]
            _linear(y, x, code[i, 3], n, code[i, 5], code[i, 6], desk, weights)
            if code[i, 7]:
                for j in range(n):
                    desk[y + j] = max(desk[y + j], np.float32(0))
        elif op == CONVOLUTION:
            _convolution(
                y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], code[i, 7], code[i, 8], code[i, 9], code[i, 10],
                desk, weights,
            )  # fmt: skip
        elif op == NORM:
            _norm(y, x, code[i, 3], code[i, 4], desk, weights)
        elif op == ADD:
            for j in range(code[i, 3]):
                desk[y + j] += desk[x + j]
        elif op == COPY:
            for j in range(code[i, 3]):
                desk[y + j] = desk[x + j]
        elif op == LSTM:
            _lstm(y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], code[i, 7], desk, weights, memory)
        elif op == GRU:
            _gru(y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], desk, weights, memory)
        else:
            _fast(
                y, x, code[i, 3], code[i, 4], code[i, 5], code[i, 6], code[i, 7], code[i, 8], desk, weights, memory
            )  # fmt: skip


@compiled
def act(
    code, weights, desk, memory, obs, scale, reward, is_first, prev_action, answer, at, lots, epsilon,
    counts, novelty, odd, samples, action,
):  # fmt: skip
    """A row of every environment: obs [B, n], memory [B, numbers] -> answer [B, A] and the action chosen by it.

    samples: like `policy.sample`, with exponential lots [B, A]; else like `policy.epsilon_greedy`, with lots [2, B] and
    epsilon [B].
    """
    n, actions = obs.shape[1], answer.shape[1]
    shown = desk[n + 1 : n + 1 + actions]
    for b in range(len(obs)):
        if is_first[b]:
            memory[b, :] = 0
        for j in range(n):
            desk[j] = obs[b, j] * scale
        desk[n] = min(max(np.float32(reward[b]), np.float32(-1)), np.float32(1))
        shown[:] = 0
        if not is_first[b]:
            shown[prev_action[b]] = 1
        run(code, desk, weights, memory[b])
        for a in range(actions):
            answer[b, a] = desk[at + a]
    if len(counts):
        count(counts, odd, obs, prev_action, is_first)
    for b in range(len(obs)):
        best = np.argmax(answer[b])
        if samples:
            best = np.argmax(answer[b] - np.log(lots[b]))
        else:
            least = epsilon[b]
            if len(counts):
                rare = rarity(counts, odd, obs[b], prev_action[b], is_first[b])
                least = max(least, np.float32(novelty * rare))
            if lots[1, b] < least:
                best = np.int64(lots[0, b] * np.float32(actions))
        action[b] = best
