"""Memory that keeps everything: look back at every row of the episode and choose what matters."""

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
LONGEST_TABLE = 1 << 16  # positions


class View(NamedTuple):
    """Which rows a chunk's rows may look at, worked out once for all layers.

    Keys lie side by side: the ring of the past (if anyone can see it), then the chunk's own rows.
    """

    position: Tensor  # [T, B] rows since the episode began
    furthest: int  # the largest of them
    past: bool  # the ring is visible to someone
    mask: Tensor | None  # [B, 1, T, keys]; None: plainly causal
    source: Tensor  # [B, slots] which row of the chunk each slot of the ring holds afterwards; negative: none
    carried: Tensor  # [B] the episode before the chunk goes on to its end, so other slots keep what they hold
    # a single row writes its slot first and then looks at the ring itself: `source` is that slot [B, 1]
    reach: int | None = None  # how many slots anyone has filled
    all_carried: bool = False


class GptLayer(nn.Module):
    """Pre-norm attention, then a pre-norm feedforward block four times as wide."""

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

    def ask(self, x: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, T, E], of rows [T, B, E]."""
        q, k, v = self.qkv(self.norm(x)).transpose(0, 1).chunk(3, -1)
        if self.rotary:
            turns = view_waves(view, q.shape[-1] // self.heads, q.dtype).transpose(0, 1)
            q, k = (rotate(z, turns) for z in (q, k))
        return q, k, v

    def forward(self, x: Tensor, view: View, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, B, E]; keys, values: [B, slots, E], the ring. Returns also the ring afterwards."""
        q, k, v = self.ask(x, view)
        after_k, after_v = turn(keys, k, view), turn(values, v, view)
        if view.reach is not None:
            seen_k, seen_v = after_k[:, : view.reach], after_v[:, : view.reach]
        elif view.past:
            seen_k, seen_v = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        else:
            seen_k, seen_v = k, v
        q, seen_k, seen_v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, seen_k, seen_v))
        y = F.scaled_dot_product_attention(
            q,
            seen_k,
            seen_v,
            attn_mask=view.mask,
            is_causal=view.mask is None,
            dropout_p=self.drop.p if self.training else 0.0,
        )
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2).transpose(0, 1)))
        x = x + self.drop(self.ff_out(F.gelu(self.ff_in(self.ff_norm(x)), approximate="tanh")))
        return x, after_k, after_v


def turn(ring: Tensor, rows: Tensor, view: View) -> Tensor:
    """The ring after a chunk: slots take the row that now belongs there, keep what they had, or are empty."""
    if view.reach is not None:
        slot = view.source[..., None].expand_as(rows)
        if not torch.is_grad_enabled():  # acting: write one slot, copy nothing
            if not view.all_carried:
                ring[~view.carried] = 0
            return ring.scatter_(1, slot, rows)
        kept = ring if view.all_carried else torch.where(view.carried[:, None, None], ring, 0)
        return kept.scatter(1, slot, rows)
    taken = rows.gather(1, view.source.clamp(min=0)[..., None].expand(-1, -1, rows.shape[-1]))
    kept = torch.where(view.carried[:, None, None], ring, 0)
    return torch.where((view.source >= 0)[..., None], taken, kept)


def waves(position: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Sine and cosine of the position at width / 2 wavelengths, from 2 pi to 20,000 pi: [..., width / 2, 2]."""
    lr_schedule = torch.arange(0, width, 2, device=position.device, dtype=torch.float64) * (-math.log(10000.0) / width)
    angle = position[..., None].to(torch.float64) * lr_schedule.exp()
    return torch.stack([angle.sin(), angle.cos()], -1).to(dtype)


@lru_cache(maxsize=32)
def wave_table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return waves(torch.arange(length, device=device), width, dtype)


def view_waves(view: View, width: int, dtype: torch.dtype) -> Tensor:
    """The waves of every row, [T, B, width / 2, 2]; looked up, as working them out costs acting more than attention."""
    if view.furthest >= LONGEST_TABLE:
        return waves(view.position, width, dtype)
    length = 1 << view.furthest.bit_length()  # doubles, so that few tables are ever made
    return wave_table(length, width, dtype, view.position.device)[view.position]


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the position (Su et al. 2021): only distances matter.

    x: [B, T, E]; turns: [B, T, D / 2, 2], for heads of width D.
    """
    x = x.unflatten(-1, (-1, 2 * turns.shape[-2]))  # [B, T, H, D]
    sin, cos = turns[:, :, None].unbind(-1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-3)


class GptCore(Core):
    """State: keys and values of every layer, each a ring [B, slots, E], and how many rows the episode has had [B].

    The row at position p lies in slot p % slots, so acting writes one slot and moves nothing. There is one slot more
    than the window has rows: acting writes in place, and the state before the row that was just written stays whole.
    """

    def __init__(self, cfg: "Gpt", input_width: int) -> None:
        super().__init__()
        self.width, self.window, self.slots = cfg.width, cfg.window, cfg.window + 1
        self.drop = nn.Dropout(cfg.dropout)
        self.positions = cfg.positions
        if not cfg.project and input_width != cfg.width:
            raise UserError(f"without core.project, core.width={cfg.width} must be that of the input: {input_width}")
        self.project = nn.Linear(input_width, cfg.width) if cfg.project else nn.Identity()
        self.table = nn.Embedding(cfg.window, cfg.width) if cfg.positions == "learned" else None
        self.layers = nn.ModuleList(GptLayer(cfg) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.width)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=cfg.weight_std or module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        if self.table is not None:
            nn.init.normal_(self.table.weight, std=0.02)  # what is seen must not drown in the positions

    def initial_state(self, batch_size: int) -> State:
        weight = self.norm.weight
        rings = (weight.new_zeros(batch_size, self.slots, self.width) for _ in range(2 * len(self.layers)))
        return *rings, torch.zeros(batch_size, dtype=torch.int64, device=weight.device)

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        *rings, count = state
        view = self.look(is_first, count)
        x = self.project(x)
        if self.positions == "sine":
            x = x + view_waves(view, self.width, x.dtype).flatten(-2)[..., : self.width]
        elif self.table is not None:
            x = x + self.table(view.position.clamp(max=self.window - 1))
        x = self.drop(x)
        after: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x, keys, values = layer(x, view, rings[2 * i], rings[2 * i + 1])
            after += [keys, values]
        return self.norm(x), (*after, view.position[-1] + 1)

    @torch.no_grad()
    def reveal(self, x: Tensor) -> dict[str, Tensor]:
        """For every layer, which past rows each row attends to: the mean over heads, [T, T]."""
        T = len(x)
        nowhere = torch.zeros(T, 1, dtype=torch.bool, device=x.device)
        back = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
        seen: dict[str, Tensor] = {}

        def watch(number: int, layer: GptLayer, inputs: tuple[Any, ...]) -> None:
            q, k, _ = layer.ask(inputs[0], inputs[1])
            q, k = (z.unflatten(-1, (layer.heads, -1)).transpose(1, 2)[0] for z in (q, k))
            score = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(
                (back < 0) | (back >= self.window), -torch.inf
            )
            seen[f"layer {number + 1}: attention to past rows"] = score.softmax(-1).mean(0)

        hooks = [
            layer.register_forward_pre_hook(lambda layer, inputs, i=i: watch(i, layer, inputs))  # type: ignore
            for i, layer in enumerate(self.layers)
        ]
        try:
            self(x, nowhere, self.initial_state(1))
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def look(self, is_first: Tensor, count: Tensor) -> View:
        T, _ = is_first.shape
        W, R, device = self.window, self.slots, is_first.device
        if T == 1:
            position = torch.where(is_first, 0, count)
            furthest = int(position.max())
            reach = min(R, furthest + 1)
            age = (position.t() - torch.arange(reach, device=device)) % R  # [B, reach]
            mask = (age < W) & (age <= position.t())
            carried = ~is_first[0]
            source, all_carried = position.t() % R, bool(carried.all())
            return View(position, furthest, True, mask[:, None, None], source, carried, reach, all_carried)

        now = torch.arange(T, device=device)
        opened = torch.where(is_first, now[:, None], -1).cummax(0).values  # [T, B] row where its episode began, or -1
        position = torch.where(opened < 0, count + now[:, None], now[:, None] - opened)
        furthest = int(position.max())
        carried = opened[-1] < 0

        slot = torch.arange(R, device=device)
        newest = position[-1][:, None] - (position[-1][:, None] - slot) % R  # [B, R] position a slot holds afterwards
        source = torch.where(newest < 0, -1, newest - position[-1][:, None] + T - 1)

        past = bool((~is_first[0] & (count > 0)).any())
        plain = not past and T <= W and not bool(is_first[1:].any())
        if plain:
            return View(position, furthest, False, None, source, carried)
        same = opened.t()[:, :, None] == opened.t()[:, None, :]  # [B, T, T]
        back = now[:, None] - now
        mask = same & (back >= 0) & (back < W)
        if past:
            held = count[:, None] - 1 - (count[:, None] - 1 - slot) % R  # [B, R] position a slot holds before
            age = position.t()[:, :, None] - held[:, None, :]
            mask = torch.cat([(opened.t()[:, :, None] < 0) & (held >= 0)[:, None, :] & (age < W), mask], -1)
        return View(position, furthest, past, mask[:, None], source, carried)


@dataclass(frozen=True)
class Gpt:
    """A causal Transformer over the episode: everything within the window is remembered exactly."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    feedforward: int | None = None
    """units of the feedforward block; None: four times the width"""
    window: int = 128
    """rows that can be looked back at, the current one included; memory per environment grows with it"""
    positions: Positions = "sine"
    """how a row knows its place: sine (added to the input), rotary, or a learned table of window entries"""
    dropout: float = 0.0
    """while learning; never while acting or in targets"""
    project: bool = True
    """bring the input to the width first; without it the input must be as wide"""
    weight_std: float | None = None
    """of the layers' first weights; None: one over the root of their inputs, 0.02: GPT-2's, made for wide layers"""

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
