"""GPT core: a causal Transformer (Vaswani et al. 2017; GPT-2, Radford et al. 2019) over a window of the episode.

x <- x + out(softmax(q K^T / sqrt(D)) V)  with q, K, V from LN(x),    x <- x + W2 gelu(W1 LN(x))
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.cores.base import Core, check_dropout, check_sizes
from bestiary.errors import UserError
from bestiary.types import State

Positions = Literal["sine", "rotary", "learned"]
MAX_TABLE_LENGTH = 1 << 16  # positions


class AttentionLayout(NamedTuple):
    """Positions and attention mask of a chunk, computed once for all layers.

    Keys are concatenated: the ring of cached keys (if any step attends to it), then the keys of the chunk.
    """

    position: Tensor  # [T, B] steps since the start of the episode
    max_position: int  # the largest position
    uses_ring: bool  # some step attends to the ring
    mask: Tensor | None  # [B, 1, T, keys]; None: causal attention within the chunk
    source: Tensor  # [B, slots] step of the chunk that each slot of the ring holds afterwards; negative: none
    continues: Tensor  # [B] no episode begins within the chunk, so the other slots stay valid
    # a chunk of one step writes its slot first and then attends to the ring; `source` is then that slot [B, 1]
    filled: int | None = None  # number of filled slots, the maximum over the batch
    all_continue: bool = False


class GptLayer(nn.Module):
    """Pre-norm self-attention, then a pre-norm feedforward block."""

    def __init__(self, cfg: "Gpt") -> None:
        super().__init__()
        self.heads = cfg.heads
        self.drop = nn.Dropout(cfg.dropout)
        self.rotary = cfg.positions == "rotary"
        self.norm = nn.LayerNorm(cfg.width)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.ff_norm = nn.LayerNorm(cfg.width)
        self.ff_in = nn.Linear(cfg.width, cfg.feedforward or 4 * cfg.width)
        self.ff_out = nn.Linear(cfg.feedforward or 4 * cfg.width, cfg.width)

    def project_qkv(self, x: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, E] of x [T, B, E]."""
        q, k, v = self.qkv(self.norm(x)).transpose(0, 1).chunk(3, -1)
        if self.rotary:
            angles = position_sinusoids(layout, q.shape[-1] // self.heads, q.dtype).transpose(0, 1)
            q, k = (rotate(z, angles) for z in (q, k))
        return q, k, v

    def forward(
        self, x: Tensor, layout: AttentionLayout, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, B, E]; keys, values: [B, slots, E], the ring. Also returns the updated ring."""
        q, k, v = self.project_qkv(x, layout)
        after_k, after_v = update_ring(keys, k, layout), update_ring(values, v, layout)
        if layout.filled is not None:
            all_k, all_v = after_k[:, : layout.filled], after_v[:, : layout.filled]
        elif layout.uses_ring:
            all_k, all_v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        else:
            all_k, all_v = k, v
        q, all_k, all_v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, all_k, all_v))
        y = F.scaled_dot_product_attention(
            q,
            all_k,
            all_v,
            attn_mask=layout.mask,
            is_causal=layout.mask is None,
            dropout_p=self.drop.p if self.training else 0.0,
        )
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2).transpose(0, 1)))
        x = x + self.drop(self.ff_out(F.gelu(self.ff_in(self.ff_norm(x)), approximate="tanh")))
        return x, after_k, after_v


def update_ring(ring: Tensor, new: Tensor, layout: AttentionLayout) -> Tensor:
    """The ring after a chunk: a slot takes its newest step, keeps its entry, or becomes empty."""
    if layout.filled is not None:
        slot = layout.source[..., None].expand_as(new)
        if not torch.is_grad_enabled():  # acting: write one slot in place
            if not layout.all_continue:
                ring[~layout.continues] = 0
            return ring.scatter_(1, slot, new)
        kept = ring if layout.all_continue else torch.where(layout.continues[:, None, None], ring, 0)
        return kept.scatter(1, slot, new)
    taken = new.gather(1, layout.source.clamp(min=0)[..., None].expand(-1, -1, new.shape[-1]))
    kept = torch.where(layout.continues[:, None, None], ring, 0)
    return torch.where((layout.source >= 0)[..., None], taken, kept)


def sinusoids(position: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal position encoding (Vaswani et al. 2017): sine and cosine at width / 2 wavelengths, [..., 2]."""
    log_frequency = torch.arange(0, width, 2, device=position.device, dtype=torch.float64) * (
        -math.log(10000.0) / width
    )
    angle = position[..., None].to(torch.float64) * log_frequency.exp()
    return torch.stack([angle.sin(), angle.cos()], -1).to(dtype)


@lru_cache(maxsize=32)
def sinusoid_table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return sinusoids(torch.arange(length, device=device), width, dtype)


def position_sinusoids(layout: AttentionLayout, width: int, dtype: torch.dtype) -> Tensor:
    """The sinusoids of every step, [T, B, width / 2, 2], from a table: computing them costs more than attention."""
    if layout.max_position >= MAX_TABLE_LENGTH:
        return sinusoids(layout.position, width, dtype)
    length = 1 << layout.max_position.bit_length()  # a power of two, so that few tables are made
    return sinusoid_table(length, width, dtype, layout.position.device)[layout.position]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): rotate pairs of features by an angle proportional to the position.

    x: [B, T, E]; angles: [B, T, D / 2, 2], for heads of width D.
    """
    x = x.unflatten(-1, (-1, 2 * angles.shape[-2]))  # [B, T, H, D]
    sin, cos = angles[:, :, None].unbind(-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-3)


class GptCore(Core):
    """State: a key-value cache per layer (rings [B, slots, E]) and the number of steps of the episode so far [B].

    The step at position p is in slot p % slots, so acting writes one slot. There are window + 1 slots: acting writes
    in place, and the state before the step that was just written stays valid.
    """

    def __init__(self, cfg: "Gpt", input_width: int) -> None:
        super().__init__()
        self.width, self.window, self.slots = cfg.width, cfg.window, cfg.window + 1
        self.drop = nn.Dropout(cfg.dropout)
        self.positions = cfg.positions
        if not cfg.project and input_width != cfg.width:
            raise UserError(f"without core.project, core.width={cfg.width} must equal the input width {input_width}")
        self.project = nn.Linear(input_width, cfg.width) if cfg.project else nn.Identity()
        self.table = nn.Embedding(cfg.window, cfg.width) if cfg.positions == "learned" else None
        self.layers = nn.ModuleList(GptLayer(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=cfg.weight_std or module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        if self.table is not None:
            nn.init.normal_(self.table.weight, std=0.02)  # small, or positions would dominate the input

    def initial_state(self, batch_size: int) -> State:
        weight = self.norm.weight
        rings = (weight.new_zeros(batch_size, self.slots, self.width) for _ in range(2 * len(self.layers)))
        return *rings, torch.zeros(batch_size, dtype=torch.int64, device=weight.device)

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        *rings, count = state
        layout = self.attention_layout(is_first, count)
        x = self.project(x)
        if self.positions == "sine":
            x = x + position_sinusoids(layout, self.width, x.dtype).flatten(-2)[..., : self.width]
        elif self.table is not None:
            x = x + self.table(layout.position.clamp(max=self.window - 1))
        x = self.drop(x)
        after: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, keys, values = layer(x, layout, rings[2 * i], rings[2 * i + 1])
            after += [keys, values]
        return self.norm(x), (*after, layout.position[-1] + 1)

    @torch.no_grad()
    def diagnostics(self, x: Tensor) -> dict[str, Tensor]:
        """For every layer the attention weights of each step, averaged over heads: [T, T]."""
        T = len(x)
        no_reset = torch.zeros(T, 1, dtype=torch.bool, device=x.device)
        distance = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
        tables: dict[str, Tensor] = {}

        def record(number: int, layer: GptLayer, inputs: tuple[Any, ...]) -> None:
            q, k, _ = layer.project_qkv(inputs[0], inputs[1])
            q, k = (z.unflatten(-1, (layer.heads, -1)).transpose(1, 2)[0] for z in (q, k))
            score = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(
                (distance < 0) | (distance >= self.window), -torch.inf
            )
            tables[f"layer {number + 1}: attention to past steps"] = score.softmax(-1).mean(0)

        hooks = [
            layer.register_forward_pre_hook(lambda layer, inputs, i=i: record(i, layer, inputs))  # type: ignore
            for i, layer in enumerate(self.layers)
        ]
        try:
            self(x, no_reset, self.initial_state(1))
        finally:
            for hook in hooks:
                hook.remove()
        return tables

    def attention_layout(self, is_first: Tensor, count: Tensor) -> AttentionLayout:
        T, _ = is_first.shape
        W, R, device = self.window, self.slots, is_first.device
        if T == 1:
            position = torch.where(is_first, 0, count)
            max_position = int(position.max())
            filled = min(R, max_position + 1)
            age = (position.t() - torch.arange(filled, device=device)) % R  # [B, filled]
            mask = (age < W) & (age <= position.t())
            continues = ~is_first[0]
            source, all_continue = position.t() % R, bool(continues.all())
            return AttentionLayout(
                position, max_position, True, mask[:, None, None], source, continues, filled, all_continue
            )

        now = torch.arange(T, device=device)
        episode_start = (
            torch.where(is_first, now[:, None], -1).cummax(0).values
        )  # [T, B] first step of the episode, or -1
        position = torch.where(episode_start < 0, count + now[:, None], now[:, None] - episode_start)
        max_position = int(position.max())
        continues = episode_start[-1] < 0

        slot = torch.arange(R, device=device)
        newest = position[-1][:, None] - (position[-1][:, None] - slot) % R  # [B, R] position a slot holds afterwards
        source = torch.where(newest < 0, -1, newest - position[-1][:, None] + T - 1)

        uses_ring = bool((~is_first[0] & (count > 0)).any())
        causal = not uses_ring and T <= W and not bool(is_first[1:].any())
        if causal:
            return AttentionLayout(position, max_position, False, None, source, continues)
        same_episode = episode_start.t()[:, :, None] == episode_start.t()[:, None, :]  # [B, T, T]
        distance = now[:, None] - now
        mask = same_episode & (distance >= 0) & (distance < W)
        if uses_ring:
            cached_position = (
                count[:, None] - 1 - (count[:, None] - 1 - slot) % R
            )  # [B, R] position a slot holds before
            age = position.t()[:, :, None] - cached_position[:, None, :]
            mask = torch.cat(
                [(episode_start.t()[:, :, None] < 0) & (cached_position >= 0)[:, None, :] & (age < W), mask], -1
            )
        return AttentionLayout(position, max_position, uses_ring, mask[:, None], source, continues)


@dataclass(frozen=True)
class Gpt:
    """GPT (Radford et al. 2019): causal self-attention over a sliding window of the episode."""

    width: int = 128
    """model width: features of embeddings and output (Ni et al. 2023: 128; 100 for images)"""
    layers: int = 2
    """number of Transformer blocks (Ni et al. 2023: 1 or 2)"""
    heads: int = 4
    """number of attention heads (Ni et al. 2023: 1 or 2)"""
    feedforward: int | None = None
    """hidden units of the feedforward block; None: four times the width, as in GPT-2"""
    window: int = 128
    """context window in steps, the current step included; the key-value cache of an environment grows with it"""
    positions: Positions = "sine"
    """position encoding: sine (added to the input), rotary (RoPE), or learned (a table of `window` embeddings)"""
    dropout: float = 0.0
    """dropout probability while learning; off while acting and in targets"""
    project: bool = True
    """linear projection of the input to the model width; without it the input must have that width"""
    weight_std: float | None = None
    """standard deviation of the initial weights (GPT-2: 0.02, for wide layers); None: 1 / sqrt(inputs of the layer)"""

    def __post_init__(self) -> None:
        check_sizes(self, "width", "layers", "heads", "feedforward", "window")
        if self.weight_std is not None and self.weight_std <= 0:
            raise UserError(f"core.weight-std={self.weight_std} must be positive")
        check_dropout(self.dropout)
        if self.width % self.heads:
            raise UserError(f"core.heads={self.heads} must divide core.width={self.width}")
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            raise UserError(f"rotary positions need an even head width, not {self.width // self.heads}")

    def build(self, input_width: int) -> Core:
        return GptCore(self, input_width)
