"""The network around every fast-weight rule (Irie et al. 2021): an input projection, then layers of

x <- x + W_o rule(LN(x)),    x <- x + feedforward(LN(x))
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.cores.base import Core, check_bptt, check_dropout, check_sizes
from bestiary.errors import UserError
from bestiary.ops import program as opcodes
from bestiary.ops.fastweights.loops import RULES, FeatureMap
from bestiary.ops.program import Program
from bestiary.types import State


@dataclass(frozen=True)
class FastWeightConfig:
    """Settings shared by all fast-weight cores."""

    width: int = 128
    """model width: features between layers and of the output (Irie et al. 2021: 128)"""
    layers: int = 2
    """number of layers (Irie et al. 2021: 2)"""
    heads: int = 4
    """number of heads, each with a fast weight matrix of its own (Irie et al. 2021: 4)"""
    head_width: int | None = None
    """width D of queries, keys and values; the fast weights of a head are D x D; None: width / heads"""
    feedforward: int = 512
    """hidden units of each layer's feedforward block (Irie et al. 2021: 512)"""
    dropout: float = 0.0
    """dropout probability while learning; off while acting and in targets"""
    bptt: int | None = None
    """length of truncated BPTT in steps; None: the whole chunk; 1: as in the published code"""

    def __post_init__(self) -> None:
        check_sizes(self, "width", "layers", "heads", "head_width", "feedforward")
        check_dropout(self.dropout)
        check_bptt(self.bptt)
        if self.head_width is None and self.width % self.heads:
            raise UserError(
                f"core.heads={self.heads} must divide core.width={self.width}, or set core.head-width yourself"
            )

    @property
    def head_dim(self) -> int:
        """D: the width of queries, keys and values."""
        return self.width // self.heads if self.head_width is None else self.head_width


class FastWeightLayer(nn.Module):
    """x + W_o rule(LN(x)), then x + feedforward(LN(x)). A subclass implements the fast-weight rule."""

    rule: str  # one of RULES
    phi: FeatureMap

    def __init__(
        self, cfg: FastWeightConfig, per_head: int, strengths: int = 0, beta_bias: float | None = None
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.bptt = cfg.heads, cfg.head_dim, cfg.bptt
        self.drop = nn.Dropout(cfg.dropout)
        self.norm = nn.LayerNorm(cfg.width)
        self.slow = nn.Linear(cfg.width, cfg.heads * per_head, bias=False)
        self.out = nn.Linear(cfg.heads * cfg.head_dim, cfg.width, bias=False)
        self.ff_norm = nn.LayerNorm(cfg.width)
        self.ff_in = nn.Linear(cfg.width, cfg.feedforward)
        self.ff_out = nn.Linear(cfg.feedforward, cfg.width)
        # bias of the write strength logit; without it the slow weights alone determine the logit, as published
        self.beta = None if beta_bias is None else nn.Parameter(torch.full((cfg.heads, strengths), float(beta_bias)))

    def initial_memory(self, batch_size: int) -> State:
        """The initial state of this layer: zeros [B, H, D, D], and further leaves if the rule has them."""
        return (self.slow.weight.new_zeros(batch_size, self.heads, self.head_dim, self.head_dim),)

    def apply_rule(self, projected: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        """The fast-weight rule: [T, B, H, per_head] -> [T, B, H, D] and the new memory."""
        raise NotImplementedError

    def slow_net(self, x: Tensor) -> Tensor:
        """The slow network: [T, B, H, per_head] queries, keys, values and write strengths, before phi and sigmoid."""
        projected = self.slow(self.norm(x)).unflatten(-1, (self.heads, -1))
        if self.beta is None:
            return projected
        return projected + F.pad(self.beta, (projected.shape[-1] - self.beta.shape[-1], 0))

    def forward(self, x: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        y, memory = self.apply_rule(self.slow_net(x), is_first, memory)
        x = x + self.drop(self.out(y.flatten(2)))
        return x + self.drop(self.ff_out(self.drop(F.relu(self.ff_in(self.ff_norm(x)))))), memory

    def compile_to(self, program: Program, x: int) -> int:
        """Append the layer's instructions; the subclass defines the rule and its recurrent weights."""
        width, per_head = self.norm.weight.numel(), self.slow.out_features // self.heads
        projected = program.alloc(self.slow.out_features)
        w = program.weights(lambda: self.slow.weight.t())
        b = -1
        if self.beta is not None:
            beta = self.beta
            b = program.weights(lambda: F.pad(beta, (per_head - beta.shape[-1], 0)))
        program.emit(opcodes.LINEAR, projected, program.norm(self.norm, x), width, self.slow.out_features, w, b)
        y = program.alloc((self.heads + 1) * self.head_dim)
        memory = program.memory(sum(leaf.numel() for leaf in self.initial_memory(1)))
        own = program.weights(*(lambda w=w: w for w in self.recurrent_weights()))
        phi = opcodes.PHI[self.phi]
        program.emit(
            opcodes.FAST_WEIGHTS, y, projected, self.heads, self.head_dim, RULES.index(self.rule), phi, own, memory
        )
        x_2 = program.linear(self.out, y)
        program.add(x_2, x, width)
        out = program.linear(self.ff_out, program.linear(self.ff_in, program.norm(self.ff_norm, x_2), relu=True))
        program.add(out, x_2, width)
        return out

    def recurrent_weights(self) -> tuple[Tensor, ...]:
        """Parameters of the rule itself, in the order in which the interpreter expects them."""
        return ()

    def mapped_qk_beta(self, projected: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """phi(q) and phi(k) [T, B, H, D] and write strengths [T, B, H, n] of an episode with outputs y."""
        raise NotImplementedError


class FastWeightCore(Core):
    """A stack of fast-weight layers. State: the layers' memories one after the other, each leaf [B, H, ...]."""

    def __init__(self, input_width: int, cfg: FastWeightConfig, layers: list[FastWeightLayer]) -> None:
        super().__init__()
        self.width = cfg.width
        self.project = nn.Linear(input_width, cfg.width)
        self.layers = nn.ModuleList(layers)

    def initial_state(self, batch_size: int) -> State:
        return tuple(leaf for layer in self.layers for leaf in layer.initial_memory(batch_size))  # type: ignore

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
    def diagnostics(self, x: Tensor) -> dict[str, Tensor]:
        """For every layer and head: write strength, similarity of query and the first step's key, memory norm."""
        no_reset = torch.zeros(1, 1, dtype=torch.bool, device=x.device)
        x = self.project(x)
        tables: dict[str, Tensor] = {}
        for number, module in enumerate(self.layers, 1):
            layer: FastWeightLayer = module  # type: ignore
            projected = layer.slow_net(x)
            memory, outputs, norms = layer.initial_memory(1), [], []
            for step in projected:
                y, memory = layer.apply_rule(step[None], no_reset, memory)
                outputs.append(y)
                norms.append(memory[0][0].flatten(1).norm(dim=-1))
            q, k, beta = layer.mapped_qk_beta(projected, torch.cat(outputs))
            for which, strength in enumerate(() if beta is None else beta[:, 0].unbind(-1)):
                memory_name = "" if which == 0 else " of the second memory"
                tables[f"layer {number}: write strength{memory_name}"] = strength
            similarity = F.cosine_similarity(q[:, 0], k[:1, 0], dim=-1)
            tables[f"layer {number}: cosine of query and first key"] = similarity
            tables[f"layer {number}: norm of the memory"] = torch.stack(norms)
            x, _ = layer(x, no_reset.expand(len(x), 1), layer.initial_memory(1))
        return tables
