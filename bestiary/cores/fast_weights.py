"""The shell around every fast-weight memory: project, then layers of (memory, feedforward), as Irie et al. 2021 do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.cores.base import Core, check_bptt, check_dropout, check_sizes
from bestiary.errors import UserError
from bestiary.ops import program as instructions
from bestiary.ops.fastweights.loops import RULES, FeatureMap
from bestiary.ops.program import Program
from bestiary.types import State

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class FastWeights:
    """What all fast-weight memories let one choose."""

    width: int = 128
    """of the core, between its layers"""
    layers: int = 2
    heads: int = 4
    head_width: int | None = None
    """of keys, queries and values; None: width / heads"""
    feedforward: int = 512
    """units of the feedforward block of each layer"""
    dropout: float = 0.0
    """while learning; never while acting or in targets"""
    bptt: int | None = None
    """rows the gradient flows back through memory; None: the whole chunk, 1: as the published code did"""

    def __post_init__(self) -> None:
        check_sizes(self, "width", "layers", "heads", "head_width", "feedforward")
        check_dropout(self.dropout)
        check_bptt(self.bptt)
        if self.head_width is None and self.width % self.heads:
            raise UserError(
                f"core.heads={self.heads} must divide core.width={self.width}, or set core.head-width yourself"
            )

    @property
    def lanes(self) -> int:
        """D: the width of a head."""
        return self.width // self.heads if self.head_width is None else self.head_width


class FastLayer(nn.Module):
    """x + W_o memory(LN(x)), then x + feedforward(LN(x)). A subclass says what the memory is."""

    rule: str  # one of RULES
    phi: FeatureMap

    def __init__(self, cfg: FastWeights, per_head: int, strengths: int = 0, beta_bias: float | None = None) -> None:
        super().__init__()
        self.heads, self.lanes, self.bptt = cfg.heads, cfg.lanes, cfg.bptt
        self.drop = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.width)
        self.slow = nn.Linear(cfg.width, cfg.heads * per_head, bias=False)
        self.out = nn.Linear(cfg.heads * cfg.lanes, cfg.width, bias=False)
        self.ff_norm = nn.LayerNorm(cfg.width)
        self.ff_in = nn.Linear(cfg.width, cfg.feedforward)
        self.ff_out = nn.Linear(cfg.feedforward, cfg.width)
        # how eagerly to write at first; without it the slow weights alone decide, as published
        self.beta = None if beta_bias is None else nn.Parameter(torch.full((cfg.heads, strengths), float(beta_bias)))

    def memories(self, batch_size: int) -> State:
        """Empty memory: [B, H, D, D], and whatever else the rule carries on."""
        return (self.slow.weight.new_zeros(batch_size, self.heads, self.lanes, self.lanes),)

    def remember(self, asked: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        """[T, B, H, per_head] -> [T, B, H, D] by the layer's rule."""
        raise NotImplementedError

    def ask(self, x: Tensor) -> Tensor:
        """[T, B, H, per_head]: what each row asks and tells, before the maps."""
        asked = self.slow(self.norm(x)).unflatten(-1, (self.heads, -1))
        if self.beta is None:
            return asked
        return asked + F.pad(self.beta, (asked.shape[-1] - self.beta.shape[-1], 0))

    def forward(self, x: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        y, memory = self.remember(self.ask(x), is_first, memory)
        x = x + self.drop(self.out(y.flatten(2)))
        return x + self.drop(self.ff_out(self.drop(F.relu(self.ff_in(self.ff_norm(x)))))), memory

    def compile_to(self, program: Program, x: int) -> int:
        """The layer as instructions; its subclass knows the rule's number and the rule's own weights."""
        width, per_head = self.norm.weight.numel(), self.slow.out_features // self.heads
        asked = program.alloc(self.slow.out_features)
        w = program.weights(lambda: self.slow.weight.t())
        b = -1
        if self.beta is not None:
            beta = self.beta
            b = program.weights(lambda: F.pad(beta, (per_head - beta.shape[-1], 0)))
        program.instruct(instructions.LINEAR, asked, program.norm(self.norm, x), width, self.slow.out_features, w, b)
        y = program.alloc((self.heads + 1) * self.lanes)
        memory = program.memory(sum(leaf.numel() for leaf in self.memories(1)))
        own = program.weights(*(lambda w=w: w for w in self.own_weights()))
        phi = instructions.PHI[self.phi]
        program.instruct(instructions.FAST, y, asked, self.heads, self.lanes, RULES.index(self.rule), phi, own, memory)
        x_2 = program.linear(self.out, y)
        program.add(x_2, x, width)
        out = program.linear(self.ff_out, program.linear(self.ff_in, program.norm(self.ff_norm, x_2), relu=True))
        program.add(out, x_2, width)
        return out

    def own_weights(self) -> tuple[Tensor, ...]:
        """What the rule itself has learnt, beside the projections."""
        return ()

    def told(self, asked: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mapped queries and keys [T, B, H, D] and write strengths [T, B, H, n] of an episode, answers y given."""
        raise NotImplementedError


class FastCore(Core):
    """State: the layers' memories one after the other, each leaf [B, H, ...]."""

    def __init__(self, input_width: int, cfg: FastWeights, layers: list[FastLayer]) -> None:
        super().__init__()
        self.width = cfg.width
        self.project = nn.Linear(input_width, cfg.width)
        self.layers = nn.ModuleList(layers)

    def initial_state(self, batch_size: int) -> State:
        return tuple(leaf for layer in self.layers for leaf in layer.memories(batch_size))  # type: ignore

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        x = self.project(x)
        leaves = len(state) // len(self.layers)
        after: State = ()
        for i, layer in enumerate(self.layers):
            x, memory = layer(x, is_first, state[i * leaves : (i + 1) * leaves])
            after += memory
        return x, after

    def compile_to(self, program: Program, x: int) -> int:
        x = program.linear(self.project, x)
        for layer in self.layers:
            x = layer.compile_to(program, x)  # type: ignore
        return x

    @torch.no_grad()
    def reveal(self, x: Tensor) -> dict[str, Tensor]:
        """For every layer and head: how strongly each row writes, whether it asks for the first row, memory's size."""
        nowhere = torch.zeros(1, 1, dtype=torch.bool, device=x.device)
        x = self.project(x)
        seen: dict[str, Tensor] = {}
        for number, module in enumerate(self.layers, 1):
            layer: FastLayer = module  # type: ignore
            asked = layer.ask(x)
            memory, answers, sizes = layer.memories(1), [], []
            for row in asked:
                y, memory = layer.remember(row[None], nowhere, memory)
                answers.append(y)
                sizes.append(memory[0][0].flatten(1).norm(dim=-1))
            q, k, beta = layer.told(asked, torch.cat(answers))
            for which, strength in enumerate(() if beta is None else beta[:, 0].unbind(-1)):
                memory_name = "" if which == 0 else " of the second memory"
                seen[f"layer {number}: write strength{memory_name}"] = strength
            alike = F.cosine_similarity(q[:, 0], k[:1, 0], dim=-1)
            seen[f"layer {number}: query against the first row's key"] = alike
            seen[f"layer {number}: size of the memory"] = torch.stack(sizes)
            x, _ = layer(x, nowhere.expand(len(x), 1), layer.memories(1))
        return seen
