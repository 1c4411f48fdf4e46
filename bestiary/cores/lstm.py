"""Memory behind gates: keep, write and show are learnt per unit."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bestiary.cores.base import Core
from bestiary.errors import UserError
from bestiary.types import State


class LstmCore(Core):
    def __init__(self, cfg: "Lstm", input_width: int) -> None:
        super().__init__()
        self.width = cfg.hidden or input_width
        self.layers = cfg.layers
        self.rnn = nn.LSTM(input_width, self.width, cfg.layers)
        if cfg.chrono is not None:
            self._remember_for(cfg.chrono)

    def initial_state(self, batch_size: int) -> State:
        weight: Tensor = self.rnn.weight_hh_l0  # type: ignore
        zeros = weight.new_zeros(batch_size, self.layers, self.width)
        return zeros, zeros.clone()

    @torch.no_grad()
    def _remember_for(self, rows: int) -> None:
        """Chrono initialisation: time constants spread over 1..rows (Tallec & Ollivier 2018)."""
        for layer in range(self.layers):
            getattr(self.rnn, f"bias_hh_l{layer}").zero_()
            gates = getattr(self.rnn, f"bias_ih_l{layer}")  # input, forget, cell, output
            gates.zero_()
            spread = torch.empty(self.width).uniform_(1, max(2, rows - 1)).log()
            gates[: self.width] = -spread
            gates[self.width : 2 * self.width] = spread

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        keep = (~is_first[0]).to(x.dtype)[:, None, None]
        h, c = ((s * keep).transpose(0, 1).contiguous() for s in state)
        if is_first[1:].any():
            y, (h, c) = self._segments(x, is_first, h, c)
        else:
            y, (h, c) = self.rnn(x, (h, c))
        return y, (h.transpose(0, 1), c.transpose(0, 1))

    def _segments(self, x: Tensor, is_first: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One fused call over all episodes of the chunk, each a sequence of its own.

        The rows are laid out as a packed sequence: sequences by falling length, step by step, so the
        cost is that of the rows alone, without padding and without a loop over time.
        """
        T, B = is_first.shape
        opens = is_first.clone()
        opens[0] = True
        row, col = opens.t().nonzero().unbind(1)[::-1]  # segment starts, ordered by column then time
        next_row = torch.cat([row[1:], row.new_tensor([T])])
        next_row = torch.where(torch.cat([col[1:] != col[:-1], col.new_tensor([1]).bool()]), T, next_row)
        length, order = (next_row - row).sort(descending=True, stable=True)
        row, col = row[order], col[order]

        at = torch.arange(int(length[0]), device=x.device)[:, None]  # [longest, 1]
        alive = at < length  # [longest, S]
        source = ((row + at) * B + col)[alive]  # row of the flat chunk, in packed order
        carried = (row == 0).to(x.dtype)[None, :, None]
        packed = PackedSequence(x.flatten(0, 1)[source], alive.sum(1).cpu())
        y, (hn, cn) = self.rnn(packed, (h[:, col] * carried, c[:, col] * carried))

        back = torch.empty_like(source)
        back[source] = torch.arange(len(source), device=x.device)
        last = (row + length == T).nonzero().squeeze(1)  # the segment that ends the chunk, per column
        last = last[col[last].argsort()]
        return y.data[back].view(T, B, -1), (hn[:, last], cn[:, last])


@dataclass(frozen=True)
class Lstm:
    """Long short-term memory, whole-chunk back-propagation through time."""

    hidden: int | None = 256
    """units per layer; None: as wide as the input"""
    layers: int = 1
    chrono: int | None = None
    """start with memory for about so many rows (chrono initialisation); None: PyTorch's initialisation"""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UserError(f"core.layers={self.layers} must be at least 1")
        if self.hidden is not None and self.hidden < 1:
            raise UserError(f"core.hidden={self.hidden} must be at least 1")
        if self.chrono is not None and self.chrono < 2:
            raise UserError(f"core.chrono={self.chrono} must be at least 2 rows")

    def build(self, input_width: int) -> Core:
        return LstmCore(self, input_width)
