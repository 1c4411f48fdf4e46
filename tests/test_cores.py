"""The core contract, tested for every core in the union, and properties of single cores."""

import dataclasses
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bestiary.algos.impala import ImpalaAgent
from bestiary.config.aliases import upgrade_weight
from bestiary.config.experiment import family
from bestiary.cores import DeltaNet, DeltaRnn, Ff, Gpt, Gru, LinearTransformer, Lstm, RecurrentDeltaNet, gpt
from bestiary.cores.base import Core
from bestiary.cores.gpt import rotate, sinusoids
from bestiary.nets import Net, Resnet
from bestiary.types import Spec, State

INPUT, HIDDEN = 6, 8
T, B = 13, 5


NARROW = {"hidden": HIDDEN, "width": HIDDEN, "heads": 2, "feedforward": 12, "window": 16}


def small(cls: type, **settings: Any) -> Any:
    """Small settings of a core; a core that refuses these values keeps its defaults."""
    names = {f.name for f in dataclasses.fields(cls)}
    try:
        return cls(**{name: value for name, value in NARROW.items() if name in names} | settings)
    except ValueError:
        return cls()


CONFIGS = {name: small(cls) for name, cls in family("core").items()} | {
    "lstm-2": small(Lstm, layers=2),
    "gru-2": small(Gru, layers=2),
    "gpt-rotary": small(Gpt, positions="rotary"),
    "gpt-learned": small(Gpt, positions="learned", layers=1),
    "gpt-short-window": small(Gpt, window=7),  # two layers still reach back over all steps
    "delta-net-silu": small(DeltaNet, feature_map="silu", beta_bias=2.0, layers=1),
    "recurrent-delta-net-elu": small(RecurrentDeltaNet, feature_map="elu", beta_bias=-1.0, heads=1, head_width=3),
    "delta-rnn-silu": small(DeltaRnn, feature_map="silu", beta_bias=1.0, layers=1),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def core(request) -> Core:
    return request.param.build(INPUT).double()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def resets(density: float, seed: int = 1, steps: int = T) -> Tensor:
    """Random resets; density 0: none, 1: at every step, which is padding."""
    return torch.rand(steps, B, generator=torch.Generator().manual_seed(seed)) < density


def used_state(core: Core, seed: int = 2) -> State:
    """A recurrent state after some random steps."""
    with torch.no_grad():
        _, state = core(normal(4, B, INPUT, seed=seed), resets(0, steps=4), core.initial_state(B))
    return tuple(s.clone() for s in state)


def select(state: State, entries: slice) -> State:
    return tuple(s[entries] for s in state)


def in_pieces(core: Core, x: Tensor, is_first: Tensor, state: State, cuts: list[int]) -> tuple[Tensor, State]:
    outputs = []
    for start, stop in pairwise([0, *cuts, len(x)]):
        y, state = core(x[start:stop], is_first[start:stop], state)
        outputs.append(y)
    return torch.cat(outputs), state


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: str) -> None:
    assert len(actual) == len(expected), what
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11, msg=lambda m, i=i: f"{what} {i}: {m}")


def assert_same_state(core: Core, actual: State, expected: State) -> None:
    """States are the same if all later outputs are the same."""
    x = normal(4, len(actual[0]), INPUT, seed=40) if actual else normal(4, 1, INPUT, seed=40)
    no_reset = torch.zeros(x.shape[:2], dtype=torch.bool)
    assert_same((core(x, no_reset, actual)[0],), (core(x, no_reset, expected)[0],), "output after the state")


class Learnt:
    """Everything a chunk gives: outputs, final memory, and the gradients of a random function of both."""

    def __init__(self, core: Core, x: Tensor, is_first: Tensor, state: State, cuts: list[int]) -> None:
        x = x.clone().requires_grad_()
        state = tuple(s.clone().requires_grad_(s.is_floating_point()) for s in state)
        self.output, self.state = in_pieces(core, x, is_first, state, cuts)
        results = [self.output, *(s for s in self.state if s.is_floating_point())]
        loss = sum((y * normal(*y.shape, seed=50 + i)).sum() for i, y in enumerate(results))
        wanted = [x, *(s for s in state if s.is_floating_point()), *core.parameters()]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
        count = len(wanted) - 1 - len(list(core.parameters()))
        self.input_gradient = gradients[0]
        self.state_gradient = gradients[1 : 1 + count]
        self.parameter_gradient = gradients[1 + count :]

    def assert_equals(self, other: "Learnt") -> None:
        assert_same((self.output,), (other.output,), "output")
        assert_same(self.state, other.state, "final state")
        assert_same((self.input_gradient,), (other.input_gradient,), "gradient into the input")
        assert_same(self.state_gradient, other.state_gradient, "gradient into the initial state")
        assert_same(self.parameter_gradient, other.parameter_gradient, "gradient into parameter")


def test_outputs_and_states_have_the_promised_shapes(core):
    state = core.initial_state(B)
    y, after = core(normal(T, B, INPUT, seed=0), resets(0.2), state)
    assert y.shape == (T, B, core.width)
    assert y.dtype == torch.float64
    assert [(s.shape, s.dtype) for s in after] == [(s.shape, s.dtype) for s in state]
    assert all(s.shape[0] == B for s in state)


@pytest.mark.parametrize("density", [0, 0.25, 1])
@pytest.mark.parametrize("cuts", [[1], [6], [12], [4, 5, 9], list(range(1, T))], ids=str)
def test_one_chunk_equals_its_pieces_and_single_steps(core, cuts, density):
    x, is_first, state = normal(T, B, INPUT, seed=3), resets(density), used_state(core)
    Learnt(core, x, is_first, state, cuts).assert_equals(Learnt(core, x, is_first, state, []))


def test_acting_in_place_keeps_the_state_of_the_step_before_valid(core):
    x, is_first, state = normal(T, B, INPUT, seed=3), resets(0.25), used_state(core)
    expected, _ = core(x, is_first, state)
    now, again, outputs = tuple(s.clone() for s in state), [], []
    with torch.no_grad():
        for t in range(T):
            before = now
            y, now = core(x[t : t + 1], is_first[t : t + 1], before)
            outputs.append(y)
            again.append(core(x[t : t + 1], is_first[t : t + 1], tuple(s.clone() for s in before))[0])
    assert_same((torch.cat(outputs),), (expected,), "step by step")
    assert_same((torch.cat(again),), (expected,), "from the state of the step before")


def test_a_chunk_does_not_change_its_arguments(core):
    x, is_first, state = normal(T, B, INPUT, seed=3), resets(0.25), used_state(core)
    before = [a.clone() for a in (x, is_first, *state)]
    core(x, is_first, state)
    assert all(torch.equal(a, b) for a, b in zip((x, is_first, *state), before, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_state_is_reset_exactly_where_episodes_start(core, seed):
    x, is_first, state = normal(T, B, INPUT, seed=4), resets(0.3, seed), used_state(core)
    y, after = core(x, is_first, state)
    for b in range(B):
        starts = [0, *(t for t in range(1, T) if is_first[t, b]), T]
        for start, stop in pairwise(starts):
            carried = start == 0 and not is_first[0, b]
            before = select(state, slice(b, b + 1)) if carried else core.initial_state(1)
            nothing_starts = torch.zeros(stop - start, 1, dtype=torch.bool)
            alone, left = core(x[start:stop, b : b + 1], nothing_starts, before)
            assert_same((y[start:stop, b : b + 1],), (alone,), f"stream {b}, steps {start} to {stop}:")
        assert_same_state(core, select(after, slice(b, b + 1)), left)


def test_no_gradient_crosses_the_start_of_an_episode(core):
    start = 7
    is_first = resets(0)
    is_first[start] = True
    x = normal(T, B, INPUT, seed=5).requires_grad_()
    y, _ = core(x, is_first, used_state(core))
    (gradient,) = torch.autograd.grad(y[start:].square().sum(), x)
    assert not gradient[:start].any()
    assert gradient[start:].any()


def test_a_reset_turns_any_state_into_the_initial_state(core):
    x, no_reset = normal(T, B, INPUT, seed=6), resets(0)
    opened = no_reset.clone()
    opened[0] = True
    fresh = core(x, no_reset, core.initial_state(B))
    reset = core(x, opened, used_state(core))
    assert_same((reset[0],), (fresh[0],), "output")
    assert_same_state(core, reset[1], fresh[1])


def test_a_core_remembers_if_it_has_a_memory_and_only_then(core):
    x = normal(T, B, INPUT, seed=7)
    other = x.clone()
    other[0] += 1
    state = core.initial_state(B)
    y, changed = core(x, resets(0), state)[0], core(other, resets(0), state)[0]
    remembers = (y - changed)[-1].abs().amax(-1) > 1e-12
    assert remembers.tolist() == [len(state) > 0] * B


def test_gradients_flow_into_a_carried_state_and_not_into_a_reset_one(core):
    is_first = resets(0)
    is_first[0, ::2] = True
    state = tuple(s.requires_grad_(s.is_floating_point()) for s in used_state(core))
    leaves = [s for s in state if s.is_floating_point()]
    x = normal(T, B, INPUT, seed=8).requires_grad_()
    y, _ = core(x, is_first, state)
    _, *gradients = torch.autograd.grad(y.square().sum(), [x, *leaves], allow_unused=True, materialize_grads=True)
    reached = torch.zeros(B, dtype=torch.bool)
    for gradient in gradients:
        reached |= gradient.flatten(1).any(1)
    assert reached.tolist() == [bool(leaves) and not first for first in is_first[0]]


def test_batch_entries_are_independent(core):
    x, is_first, state = normal(T, B, INPUT, seed=9), resets(0.25), used_state(core)
    y, after = core(x, is_first, state)
    for b in range(B):
        one = slice(b, b + 1)
        alone, left = core(x[:, one], is_first[:, one], select(state, one))
        assert_same((y[:, one],), (alone,), f"output of stream {b}")
        assert_same(select(after, one), left, f"memory of stream {b}")


def test_a_stream_does_not_depend_on_its_neighbours(core):
    x, is_first, state = normal(T, B, INPUT, seed=9), resets(0.25), used_state(core)
    others = torch.arange(B) != 2
    changed_x, changed_first = x.clone(), is_first.clone()
    changed_x[:, others] *= 100
    changed_first[:, others] = resets(0.5, seed=77)[:, others]
    changed_state = tuple(
        torch.where(others.view(-1, *[1] * (s.dim() - 1)), t, s)
        for s, t in zip(state, used_state(core, seed=78), strict=True)
    )
    y, after = core(x, is_first, state)
    y2, after2 = core(changed_x, changed_first, changed_state)
    assert_same((y2[:, 2],), (y[:, 2],), "output")
    assert_same(select(after2, slice(2, 3)), select(after, slice(2, 3)), "memory")


def test_gradients_do_not_mix_streams(core):
    x = normal(T, B, INPUT, seed=10).requires_grad_()
    y, _ = core(x, resets(0.25), used_state(core))
    (gradient,) = torch.autograd.grad(y[:, 1].square().sum(), x)
    touched = gradient.abs().amax((0, 2)) > 0
    assert touched.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("density", [0, 0.25])
def test_every_parameter_is_trained(core, density):
    x = normal(T, B, INPUT, seed=11).requires_grad_()
    y, _ = core(x, resets(density), used_state(core))
    (y * normal(*y.shape, seed=12)).sum().backward()
    untrained = [name for name, p in core.named_parameters() if p.grad is None or not p.grad.any()]
    assert untrained == []
    assert x.grad.any()


def test_acting_and_learning_may_use_float32_too(core):
    core = core.float()
    x, is_first = normal(T, B, INPUT, seed=13).float(), resets(0.25)
    y, state = in_pieces(core, x, is_first, core.initial_state(B), list(range(1, T)))
    whole, final = core(x, is_first, core.initial_state(B))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-5)


def lstm_loop(rnn: nn.LSTM, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
    """A plain LSTM loop: step by step, stream by stream, with zero state at every reset."""
    columns, finals = [], []
    for b in range(x.shape[1]):
        h, c = (s[b][:, None] for s in state)  # [layers, 1, hidden]
        outputs = []
        for t in range(len(x)):
            if is_first[t, b]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            y, (h, c) = rnn(x[t, b][None, None], (h, c))
            outputs.append(y[0, 0])
        columns.append(torch.stack(outputs))
        finals.append((h[:, 0], c[:, 0]))
    return torch.stack(columns, 1), tuple(torch.stack(leaf) for leaf in zip(*finals, strict=True))


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("density", [0, 0.25, 1])
def test_the_lstm_is_a_loop_over_its_cell(layers, density):
    core = Lstm(hidden=HIDDEN, layers=layers).build(INPUT).double()
    x, is_first = normal(T, B, INPUT, seed=20), resets(density)
    state = tuple(normal(B, layers, HIDDEN, seed=21 + i) for i in range(2))
    y, final = core(x, is_first, state)
    slow, slow_final = lstm_loop(core.rnn, x, is_first, state)
    assert_same((y,), (slow,), "output")
    assert_same(final, slow_final, "final state")

    weight = normal(*y.shape, seed=23)
    fast_gradient = torch.autograd.grad((y * weight).sum(), list(core.parameters()))
    slow_gradient = torch.autograd.grad((slow * weight).sum(), list(core.parameters()))
    assert_same(fast_gradient, slow_gradient, "gradient into parameter")


def test_the_lstm_follows_its_equations():
    core = Lstm(hidden=HIDDEN).build(INPUT).double()
    x = normal(1, B, INPUT, seed=24)
    h, c = normal(B, HIDDEN, seed=25), normal(B, HIDDEN, seed=26)
    rnn = core.rnn
    gates = x[0] @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + h @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
    i, f, g, o = gates.chunk(4, -1)
    c_next = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h_next = o.sigmoid() * c_next.tanh()
    y, state = core(x, torch.zeros(1, B, dtype=torch.bool), (h[:, None], c[:, None]))
    assert_same((y[0], state[0][:, 0], state[1][:, 0]), (h_next, h_next, c_next), "output, h, c")


def test_an_lstm_without_a_hidden_size_has_the_width_of_its_input():
    core = Lstm(hidden=None, layers=2).build(INPUT)
    assert core.width == INPUT
    assert [s.shape for s in core.initial_state(3)] == [(3, 2, INPUT)] * 2


def test_a_feedforward_core_is_the_identity():
    core = family("core")["ff"]().build(INPUT)
    x = normal(T, B, INPUT, seed=30)
    y, state = core(x, resets(0.5), core.initial_state(B))
    assert torch.equal(y, x)
    assert state == ()
    assert core.width == INPUT


def test_an_lstm_of_no_size_is_refused():
    with pytest.raises(ValueError, match=r"core\.layers=0 must be at least 1"):
        Lstm(layers=0)
    with pytest.raises(ValueError, match=r"core\.hidden=0 must be at least 1"):
        Lstm(hidden=0)


def test_chrono_initialisation_gives_an_lstm_its_time_scales():
    # a forget gate of sigmoid(log k) = k / (k + 1) has a time scale of about k steps; input gate: 1 - forget gate
    t_max = 50
    core = Lstm(hidden=400, layers=2, chrono=t_max).build(INPUT)
    for layer in range(2):
        given, forget, cell, output = getattr(core.rnn, f"bias_ih_l{layer}").chunk(4)
        assert torch.equal(given, -forget)
        assert not getattr(core.rnn, f"bias_hh_l{layer}").any()
        assert not cell.any()
        assert not output.any()
        span = forget.exp()
        assert 1 <= span.min() < 3
        assert t_max - 4 < span.max() <= t_max - 1
        assert span.mean().item() == pytest.approx(t_max / 2, rel=0.1)


@pytest.mark.parametrize("cls", [Lstm, Gru])
def test_gates_may_start_orthogonal_and_unbiased(cls):
    core = cls(hidden=6, layers=2, init="orthogonal").build(INPUT)
    for name, p in core.rnn.named_parameters():
        if name.startswith("bias"):
            assert not p.any()
        else:
            torch.testing.assert_close(p.T @ p, torch.eye(p.shape[1]), atol=1e-5, rtol=0)
    chrono = cls(hidden=6, init="orthogonal", chrono=50).build(INPUT)
    assert any(b.any() for pair in chrono.biases() for b in pair)  # chrono overrides the biases


def test_a_gpt_may_use_its_input_without_a_projection():
    plain, projected = (Gpt(width=8, heads=2, layers=1, project=p).build(8) for p in (False, True))
    sizes = [sum(p.numel() for p in core.parameters()) for core in (plain, projected)]
    assert sizes[1] - sizes[0] == 8 * 8 + 8
    with torch.no_grad():
        projected.load_state_dict(
            {**plain.state_dict(), "project.weight": torch.eye(8), "project.bias": torch.zeros(8)}
        )
    x, is_first = torch.randn(5, 3, 8), torch.zeros(5, 3, dtype=torch.bool)
    outputs = [core(x, is_first, core.initial_state(3))[0] for core in (plain, projected)]
    torch.testing.assert_close(*outputs)
    with pytest.raises(ValueError, match=r"without core\.project, core\.width=8 must equal the input width 9"):
        Gpt(width=8, heads=2, project=False).build(9)


def test_a_chrono_of_less_than_two_steps_is_refused():
    with pytest.raises(ValueError, match=r"core\.chrono=1 must be at least 2 steps"):
        Lstm(chrono=1)


def test_chrono_initialisation_gives_a_gru_its_time_scales():
    t_max = 50
    core = Gru(hidden=400, layers=2, chrono=t_max).build(INPUT)
    for bias_ih, bias_hh in core.biases():
        reset, keep, new = bias_ih.chunk(3)
        assert not reset.any()
        assert not new.any()
        assert not bias_hh.any()
        assert keep.exp().mean().item() == pytest.approx(t_max / 2, rel=0.1)


def test_the_gru_follows_its_equations():
    core = Gru(hidden=HIDDEN).build(INPUT).double()
    x, h, rnn = normal(1, B, INPUT, seed=24), normal(B, HIDDEN, seed=25), core.rnn
    given, known = x[0] @ rnn.weight_ih_l0.T + rnn.bias_ih_l0, h @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
    (r_x, z_x, n_x), (r_h, z_h, n_h) = given.chunk(3, -1), known.chunk(3, -1)
    z = (z_x + z_h).sigmoid()
    h_next = (1 - z) * (n_x + (r_x + r_h).sigmoid() * n_h).tanh() + z * h
    y, state = core(x, torch.zeros(1, B, dtype=torch.bool), (h[:, None],))
    assert_same((y[0], state[0][:, 0]), (h_next, h_next), "output, h")


@pytest.mark.parametrize("cls", [Lstm, Gru])
@pytest.mark.parametrize("bptt", [1, 4])
def test_truncated_gradients_stop_at_every_piece(cls, bptt):
    core = cls(hidden=HIDDEN, bptt=bptt).build(INPUT).double()
    whole = cls(hidden=HIDDEN).build(INPUT).double()
    whole.load_state_dict(core.state_dict())
    x, is_first, state = normal(T, B, INPUT, seed=3).requires_grad_(), resets(0.1), used_state(core)
    y, final = core(x, is_first, state)
    expected, expected_final = whole(x, is_first, state)
    assert_same((y, *final), (expected, *expected_final), "outputs do not depend on it")
    (gradient,) = torch.autograd.grad(y[T - 1].sum(), x)
    first = (T - 1) // bptt * bptt
    assert not gradient[:first].any()
    assert gradient[first:].any()


FAST = [LinearTransformer, DeltaNet, RecurrentDeltaNet, DeltaRnn]


@pytest.mark.parametrize("cls", FAST)
def test_truncated_gradients_of_fast_weights_stop_at_every_piece(cls):
    core = small(cls, bptt=4).build(INPUT).double()
    x = normal(T, B, INPUT, seed=3).requires_grad_()
    y, _ = core(x, resets(0), used_state(core))
    (gradient,) = torch.autograd.grad(y[T - 1].sum(), x)
    assert not gradient[:12].any()
    assert gradient[12:].any()


def test_a_window_of_one_step_has_no_memory():
    core = small(Gpt, window=1).build(INPUT).double()
    x = normal(T, B, INPUT, seed=7)
    other = x.clone()
    other[:-1] += 1
    assert torch.equal(
        core(x, resets(0), core.initial_state(B))[0][-1], core(other, resets(0), core.initial_state(B))[0][-1]
    )


def test_steps_before_the_window_have_no_effect():
    core = small(Gpt, window=4, layers=1).build(INPUT).double()
    x = normal(T, B, INPUT, seed=7)
    old, recent = x.clone(), x.clone()
    old[T - 5] += 1
    recent[T - 4] += 1
    y, y_old, y_recent = (core(z, resets(0), core.initial_state(B))[0][-1] for z in (x, old, recent))
    assert torch.equal(y, y_old)
    assert not torch.equal(y, y_recent)


def test_a_window_that_covers_the_episode_is_exact():
    tight, wide = small(Gpt, window=T).build(INPUT).double(), small(Gpt, window=3 * T).build(INPUT).double()
    wide.load_state_dict(tight.state_dict())
    x = normal(T, B, INPUT, seed=7)
    assert_same(
        (tight(x, resets(0), tight.initial_state(B))[0],), (wide(x, resets(0), wide.initial_state(B))[0],), "output"
    )


def attention_by_hand(core: Any, x: Tensor) -> Tensor:
    """GPT-2's block as its equations say, for one episode [T, E] from its first step."""
    E, heads = core.width, core.layers[0].heads
    position = torch.arange(len(x), dtype=torch.float64)[:, None]
    place = torch.zeros(len(x), E, dtype=torch.float64)
    for i in range(0, E, 2):
        place[:, i] = torch.sin(position[:, 0] / 10000 ** (i / E))
        place[:, i + 1] = torch.cos(position[:, 0] / 10000 ** (i / E))
    x = core.project(x) + place
    for layer in core.layers:
        q, k, v = layer.qkv(layer.norm(x)).chunk(3, -1)
        outputs = []
        for part in range(heads):
            cut = slice(part * E // heads, (part + 1) * E // heads)
            score = q[:, cut] @ k[:, cut].T / (E // heads) ** 0.5
            score = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
            outputs.append(score.softmax(-1) @ v[:, cut])
        x = x + layer.out(torch.cat(outputs, -1))
        x = x + layer.ff_out(nn.functional.gelu(layer.ff_in(layer.ff_norm(x)), approximate="tanh"))
    return core.norm(x)


def test_the_gpt_follows_its_equations():
    core = small(Gpt).build(INPUT).double()
    for p in core.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    x = normal(T, B, INPUT, seed=31)
    y, _ = core(x, resets(0), core.initial_state(B))
    assert_same((y,), (torch.stack([attention_by_hand(core, x[:, b]) for b in range(B)], 1),), "output")


def test_rotary_positions_depend_on_distances_only():
    q = normal(B, 2, HIDDEN, seed=9)
    near, far = (rotate(q, sinusoids(torch.tensor([[a, a + 3]] * B), HIDDEN // 2, q.dtype)) for a in (0, 17))
    assert_same(((near[:, 0] * near[:, 1]).sum(-1),), ((far[:, 0] * far[:, 1]).sum(-1),), "similarity at distance 3")


@pytest.mark.parametrize("positions", ["sine", "rotary"])
def test_positions_beyond_the_table_are_computed(positions, monkeypatch):
    core = small(Gpt, positions=positions).build(INPUT).double()
    x = normal(T, B, INPUT, seed=7)
    looked_up = core(x, resets(0), core.initial_state(B))
    monkeypatch.setattr(gpt, "MAX_TABLE_LENGTH", 0)
    assert_same(looked_up[:1], core(x, resets(0), core.initial_state(B))[:1], "output")


def test_weights_start_at_the_scale_of_their_inputs_or_as_configured():
    for std, inputs in ((None, 64), (0.02, 64)):
        layer: Any = Gpt(width=64, layers=1, weight_std=std).build(INPUT).layers[0]  # type: ignore
        assert layer.qkv.weight.std().item() == pytest.approx(std or inputs**-0.5, rel=0.05)
        assert layer.ff_out.weight.std().item() == pytest.approx(std or (4 * inputs) ** -0.5, rel=0.05)


@pytest.mark.parametrize("cls", [Gpt, *FAST])
def test_dropout_acts_while_learning_only(cls):
    core = small(cls, dropout=0.5).build(INPUT).double()
    x, no_reset = normal(T, B, INPUT, seed=7), resets(0)
    torch.manual_seed(0)
    noisy = [core(x, no_reset, core.initial_state(B))[0] for _ in range(2)]
    core.eval()
    calm = [core(x, no_reset, core.initial_state(B))[0] for _ in range(2)]
    assert not torch.equal(*noisy)
    assert torch.equal(*calm)


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        (Gpt, {"width": 10, "heads": 4}, r"core\.heads=4 must divide core\.width=10"),
        (Gpt, {"window": 0}, r"core\.window=0 must be at least 1"),
        (Gpt, {"dropout": 1.0}, r"core\.dropout=1.0 must lie in \[0, 1\)"),
        (Gpt, {"positions": "rotary", "width": 6, "heads": 2}, "even head width, not 3"),
        (Gpt, {"feedforward": 0}, r"core\.feedforward=0"),
        (Gpt, {"weight_std": 0.0}, r"core\.weight-std=0.0 must be positive"),
        (DeltaNet, {"width": 10, "heads": 4}, r"core\.heads=4 must divide core\.width=10"),
        (DeltaNet, {"head_width": 0}, r"core\.head-width=0"),
        (DeltaRnn, {"bptt": 0}, r"core\.bptt=0 must be at least 1 step"),
        (RecurrentDeltaNet, {"dropout": -0.1}, r"core\.dropout=-0.1 must lie in \[0, 1\)"),
        (LinearTransformer, {"layers": 0}, r"core\.layers=0 must be at least 1"),
        (Lstm, {"bptt": 0}, r"core\.bptt=0 must be at least 1 step"),
        (Gru, {"hidden": 0}, r"core\.hidden=0 must be at least 1"),
        (Gru, {"chrono": 1}, r"core\.chrono=1 must be at least 2 steps"),
    ],
)
def test_impossible_settings_are_refused(cls, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        cls(**settings)


@pytest.mark.parametrize(
    ("cls", "total", "floats"),
    [
        (Ff, 1_091_038, 0),
        (Lstm, 1_618_391, 512),
        (LinearTransformer, 1_518_679, 8_192),
        (DeltaNet, 1_519_703, 8_192),
        (RecurrentDeltaNet, 1_544_535, 8_448),
        (DeltaRnn, 1_586_263, 16_640),
    ],
)
def test_parameter_counts_with_the_residual_encoder_are_published_ones(cls, total, floats):
    spec = Spec("Pong", (1, 84, 84), torch.uint8, 6)
    net = Net(encoder=Resnet(), frame_stack=4, prev_action=False)
    agent = ImpalaAgent(spec, net, cls())
    assert sum(p.numel() for p in agent.parameters()) == total
    assert sum(s[0].numel() for s in agent.torso.core.initial_state(1)) == floats


def test_old_weights_of_a_recurrent_delta_net_load():
    core = small(RecurrentDeltaNet).build(INPUT)
    old_names = {"R_q": "heard_q", "R_k": "heard_k", "R_v": "heard_v", "r_beta": "heard_beta"}
    old = {}
    for key, value in core.state_dict().items():
        prefix, _, last = key.rpartition(".")
        old[f"torso.core.{prefix}.{old_names.get(last, last)}"] = value
    assert sum(".heard_" in key for key in old) == 4 * len(core.layers)  # type: ignore
    assert [upgrade_weight(key) for key in old] == [f"torso.core.{key}" for key in core.state_dict()]


def test_a_gpt_trains_on_1500_steps_within_two_gigabytes():
    code = """
import resource, torch
from bestiary.cores import Gpt
core, T, B = Gpt(width=128, layers=2, window=1500).build(32), 1500, 8
x, is_first = torch.randn(T, B, 32), torch.rand(T, B) < 0.001
with torch.no_grad():
    _, state = core(x, is_first, core.initial_state(B))
core(x, is_first, state)[0].sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 2  # GiB; ru_maxrss counts KiB on Linux
