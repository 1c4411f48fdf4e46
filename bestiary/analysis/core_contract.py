"""Checks of the core contract, for any core: each check passes, or describes the first violation."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bestiary.cores.base import Core, CoreConfig
from bestiary.types import Spec, State

INPUT, T, B = 6, 13, 4
TOLERANCE = 1e-9


class ContractCheck(NamedTuple):
    requirement: str
    violation: str | None  # None: the check passed


@dataclass
class Chunk:
    """A core, a chunk of inputs in float64, and a recurrent state that is not the initial one."""

    core: Core
    x: Tensor
    is_first: Tensor
    state: State

    def run(self, cuts: list[int]) -> tuple[Tensor, State]:
        outputs, state = [], self.state
        for start, stop in pairwise([0, *cuts, T]):
            y, state = self.core(self.x[start:stop], self.is_first[start:stop], state)
            outputs.append(y)
        return torch.cat(outputs), state

    def gradients(self, cuts: list[int]) -> list[Tensor]:
        """Gradients of a random function of outputs and final state, with respect to inputs, state and parameters."""
        self.x.requires_grad_()
        for leaf in self.floating(self.state):
            leaf.requires_grad_()
        y, after = self.run(cuts)
        loss = sum((z * _normal(*z.shape, seed=9 + i)).sum() for i, z in enumerate([y, *self.floating(after)]))
        wanted = [self.x, *self.floating(self.state), *self.core.parameters()]
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))  # type: ignore

    @staticmethod
    def floating(state: State) -> list[Tensor]:
        return [leaf for leaf in state if leaf.is_floating_point()]


def check_contract(config: CoreConfig) -> Iterator[ContractCheck]:
    """Run every check of the contract. An exception is a violation."""
    torch.manual_seed(0)
    core = config.build(INPUT).double().eval()
    for check in (shapes, chunks, steps, gradients, resets, streams, arguments, training, compiled):
        requirement = (check.__doc__ or "").strip()
        try:
            violation = check(core)
        except Exception as e:
            violation = f"{type(e).__name__}: {e}"
        yield ContractCheck(requirement, violation)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _chunk(core: Core, density: float = 0.25) -> Chunk:
    is_first = torch.rand(T, B, generator=torch.Generator().manual_seed(1)) < density
    with torch.no_grad():
        no_starts = torch.zeros(4, B, dtype=torch.bool)
        _, state = core(_normal(4, B, INPUT, seed=2), no_starts, core.initial_state(B))
    return Chunk(core, _normal(T, B, INPUT, seed=3), is_first, tuple(leaf.clone() for leaf in state))


def _first_difference(actual: Tensor, expected: Tensor, what: str) -> str | None:
    """The first step at which two tensors [T, B, ...] differ."""
    if actual.shape != expected.shape:
        return f"{what} has shape {list(actual.shape)}, not {list(expected.shape)}"
    gap = (actual - expected).abs().flatten(2).amax(-1)
    gap = torch.where(gap.isnan(), torch.inf, gap)
    wrong = gap > TOLERANCE * (1 + expected.abs().flatten(2).amax(-1))
    if not wrong.any():
        return None
    t = int(wrong.any(1).nonzero()[0])
    b = int(wrong[t].nonzero()[0])
    return f"{what} differs first at step {t}, stream {b}, by {gap[t, b]:.2g}"


def _state_gap(actual: State, expected: State) -> str | None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a.shape != e.shape or not torch.allclose(a.double(), e.double(), rtol=TOLERANCE, atol=TOLERANCE):
            return f"leaf {i} of the final state differs"
    return None


def shapes(core: Core) -> str | None:
    """outputs are [T, B, width]; every leaf of the state begins with B and keeps its shape"""
    state = core.initial_state(B)
    for i, leaf in enumerate(state):
        if leaf.dim() < 1 or leaf.shape[0] != B:
            return f"leaf {i} of initial_state({B}) has shape {list(leaf.shape)}: the first axis must be the batch"
    y, after = core(_normal(T, B, INPUT, seed=0), torch.zeros(T, B, dtype=torch.bool), state)
    if y.shape != (T, B, core.width):
        return f"the output has shape {list(y.shape)}, not [{T}, {B}, width={core.width}]"
    if [(s.shape, s.dtype) for s in after] != [(s.shape, s.dtype) for s in state]:
        return "the state does not keep its shapes and types"
    return None


def chunks(core: Core) -> str | None:
    """one chunk equals two chunks"""
    return _compare(core, [6])


def steps(core: Core) -> str | None:
    """one chunk equals step by step: acting and learning compute the same"""
    return _compare(core, list(range(1, T)))


def _compare(core: Core, cuts: list[int]) -> str | None:
    for density in (0.0, 0.25):
        chunk = _chunk(core, density)
        (y, after), (whole, whole_after) = chunk.run(cuts), chunk.run([])
        violation = _first_difference(y, whole, "the output") or _state_gap(after, whole_after)
        if violation:
            return violation + (" (no episode starts inside)" if density == 0 else " (episodes start inside)")
    return None


def gradients(core: Core) -> str | None:
    """gradients of one chunk equal those of several chunks, with respect to inputs, initial state and parameters"""
    whole, cut = _chunk(core).gradients([]), _chunk(core).gradients([4, 5, 9])
    violation = _first_difference(cut[0], whole[0], "the gradient of the input")
    if violation:
        return violation
    leaves = len(Chunk.floating(_chunk(core).state))
    names = [f"leaf {i} of the initial state" for i in range(leaves)] + [name for name, _ in core.named_parameters()]
    for name, a, e in zip(names, cut[1:], whole[1:], strict=True):
        if not torch.allclose(a, e, rtol=1e-7, atol=TOLERANCE):
            return f"the gradient of {name} differs"
    return None


def resets(core: Core) -> str | None:
    """the recurrent state is reset exactly where is_first is true"""
    chunk = _chunk(core)
    y, _ = chunk.run([])
    for b in range(B):
        starts = [0, *(t for t in range(1, T) if chunk.is_first[t, b]), T]
        for start, stop in pairwise(starts):
            one = slice(b, b + 1)
            carried = start == 0 and not chunk.is_first[0, b]
            state = tuple(leaf[one] for leaf in chunk.state) if carried else core.initial_state(1)
            no_starts = torch.zeros(stop - start, 1, dtype=torch.bool)
            separate, _ = core(chunk.x[start:stop, one], no_starts, state)
            gap = (separate[:, 0] - y[start:stop, b]).abs().amax(-1)
            if (gap > TOLERANCE * (1 + separate.abs().max())).any():
                t = start + int((gap > TOLERANCE).nonzero()[0])
                return f"step {t} of stream {b} differs from that of a separate episode (which begins at step {start})"
    return None


def streams(core: Core) -> str | None:
    """the streams of a batch are independent"""
    chunk = _chunk(core)
    changed = chunk.x.clone()
    changed[:, 1:] += 1
    y, other = chunk.run([])[0], Chunk(core, changed, chunk.is_first, chunk.state).run([])[0]
    return _first_difference(other[:, :1], y[:, :1], "with other inputs in the other streams, stream 0")


def arguments(core: Core) -> str | None:
    """inputs and state are not changed in place"""
    chunk = _chunk(core)
    before = [leaf.clone() for leaf in (chunk.x, chunk.is_first, *chunk.state)]
    chunk.run([])
    after = (chunk.x, chunk.is_first, *chunk.state)
    changed = [i for i, (a, e) in enumerate(zip(after, before, strict=True)) if not torch.equal(a, e)]
    names = ["x", "is_first", *(f"leaf {i} of the state" for i in range(len(chunk.state)))]
    return f"{names[changed[0]]} was changed" if changed else None


def training(core: Core) -> str | None:
    """every parameter gets a gradient"""
    chunk = _chunk(core)
    y, _ = chunk.run([])
    weights = dict(core.named_parameters())
    if not weights:
        return None
    found = torch.autograd.grad((y * _normal(*y.shape, seed=5)).sum(), list(weights.values()), allow_unused=True)
    idle = [name for name, g in zip(weights, found, strict=True) if g is None or not g.any()]
    return f"{idle[0]} gets none" if idle else None


@torch.no_grad()
def compiled(core: Core) -> str | None:
    """the compiled form of the core, if it has one, computes the same"""
    from bestiary.ops import interpreter
    from bestiary.ops.program import Program, flatten_state, unflatten_state

    program = Program(Spec("any", (INPUT,), torch.float32, 1))
    at = core.compile_to(program, program.obs)
    if at is None:
        return None
    chunk = _chunk(core)
    expected, after = chunk.run([])
    code, weights, scratch = program.instructions(), program.load_weights(), np.zeros(program.scratch_size, np.float32)
    memory = flatten_state(tuple(leaf.float() for leaf in chunk.state), B)
    y = torch.zeros(T, B, core.width, dtype=torch.float64)
    for t in range(T):
        for b in range(B):
            if chunk.is_first[t, b]:
                memory[b] = 0
            scratch[:INPUT] = chunk.x[t, b].numpy()
            interpreter.run(code, scratch, weights, memory[b])
            y[t, b] = torch.from_numpy(scratch[at : at + core.width].astype(np.float64))
    single = 1e-4  # the compiled form has single precision
    if (y - expected).abs().max() > single * (1 + expected.abs().max()):
        t = int((y - expected).abs().flatten(1).amax(1).argmax())
        return f"the output differs most at step {t}: override compile_to, or let it return None"
    for a, e in zip(unflatten_state(memory, chunk.state), after, strict=True):
        if (a - e).abs().max() > single * (1 + e.abs().max()):
            return "the final state differs"
    return None
