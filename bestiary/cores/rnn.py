"""Gated recurrent networks: one fused call per chunk, wherever in it episodes begin."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bestiary.cores.base import Core, check_bptt, check_sizes
from bestiary.errors import UserError
from bestiary.ops import program as instructions
from bestiary.ops.program import Program
from bestiary.types import State

if TYPE_CHECKING:
    pass


class GatedCore(Core):
    """An nn.LSTM or nn.GRU that forgets where it should. State: h (and c), each [B, layers, width]."""

    def __init__(self, rnn: nn.LSTM | nn.GRU, leaves: int, bptt: int | None) -> None:
        super().__init__()
        self.rnn = rnn
        self.width = rnn.hidden_size
        self.leaves = leaves
        self.bptt = bptt

    def initial_state(self, batch_size: int) -> State:
        weight: Tensor = self.rnn.weight_hh_l0  # type: ignore
        return tuple(weight.new_zeros(batch_size, self.rnn.num_layers, self.width) for _ in range(self.leaves))

    def biases(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer: from the input, [gates * width], and from itself."""
        for layer in range(self.rnn.num_layers):
            yield getattr(self.rnn, f"bias_ih_l{layer}"), getattr(self.rnn, f"bias_hh_l{layer}")

    @torch.no_grad()
    def orthogonal(self) -> None:
        for name, p in self.rnn.named_parameters():
            nn.init.orthogonal_(p) if name.startswith("weight") else p.zero_()

    def time_constants(self, rows: int) -> Tensor:
        """Biases that make units remember for 1 to `rows` rows (Tallec & Ollivier 2018)."""
        return torch.empty(self.width).uniform_(1, max(2, rows - 1)).log()

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        if self.bptt is None:
            return self._chunk(x, is_first, state)
        outputs = []
        for rows, first in zip(x.split(self.bptt), is_first.split(self.bptt), strict=True):
            y, state = self._chunk(rows, first, tuple(s.detach() for s in state))
            outputs.append(y)
        return torch.cat(outputs), state

    def compile_to(self, program: Program, x: int) -> int:
        n, hidden, layers = self.rnn.input_size, self.width, self.rnn.num_layers
        memory = program.memory(self.leaves * layers * hidden)
        for layer, (from_input, from_itself) in enumerate(self.biases()):
            of_input, of_itself = (getattr(self.rnn, f"weight_{side}_l{layer}") for side in ("ih", "hh"))
            sources = [lambda w=of_input: w.t(), lambda w=of_itself: w.t()]
            h = memory + layer * hidden
            if self.leaves == 2:
                y = program.alloc(5 * hidden)
                w = program.weights(*sources, lambda a=from_input, b=from_itself: a + b)
                program.instruct(instructions.LSTM, y, x, n, hidden, w, h, h + layers * hidden)
            else:
                y = program.alloc(7 * hidden)
                w = program.weights(*sources, lambda a=from_input: a, lambda b=from_itself: b)
                program.instruct(instructions.GRU, y, x, n, hidden, w, h)
            x, n = y, hidden
        return x

    def _chunk(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        keep = ~is_first[0][:, None, None]
        memory = tuple(torch.where(keep, s, 0).transpose(0, 1).contiguous() for s in state)
        if not is_first[1:].any():
            y, memory = self._call(x, memory)
        elif x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
            y, memory = self._rows(x, is_first, memory)
        else:
            y, memory = self._segments(x, is_first, memory)
        return y, tuple(m.transpose(0, 1) for m in memory)

    def _call(self, x: Tensor | PackedSequence, memory: State) -> tuple[Tensor, State]:
        """nn.LSTM keeps its memory in a pair, nn.GRU in a single tensor."""
        if self.leaves == 1:
            y, h = self.rnn(x, memory[0])
            return y, (h,)
        return self.rnn(x, memory)

    def _rows(self, x: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        """Layer by layer, with resets inside: what is fastest on a CPU."""
        from bestiary.ops import gates

        after: list[list[Tensor]] = []
        for layer, before in enumerate(zip(*memory, strict=True)):
            names = (f"{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            W, U, from_input, from_itself = (getattr(self.rnn, name) for name in names)
            if self.leaves == 2:
                x, *left = gates.lstm(x, W, U, from_input + from_itself, is_first, *before)
            else:
                x, *left = gates.gru(x, W, U, from_input, from_itself, is_first, *before)
            after.append(left)
        return x, tuple(torch.stack(leaf) for leaf in zip(*after, strict=True))

    @torch.no_grad()
    def reveal(self, x: Tensor) -> dict[str, Tensor]:
        """Hidden state and gates of the last layer."""
        state, shown, opened = self.initial_state(1), [], []
        last = self.rnn.num_layers - 1
        w_in, w_self = (getattr(self.rnn, f"weight_{kind}_l{last}") for kind in ("ih", "hh"))
        b_in, b_self = (getattr(self.rnn, f"bias_{kind}_l{last}") for kind in ("ih", "hh"))
        for row in x:
            before = state[0][:, last]
            y, state = self(row[None], torch.zeros(1, 1, dtype=torch.bool, device=x.device), state)
            given = row if last == 0 else state[0][:, last - 1]  # what the last layer was shown
            opened.append((given @ w_in.T + b_in + before @ w_self.T + b_self).sigmoid()[0])
            shown.append(y[0, 0])
        names = (
            ("input gate", "forget gate", "", "output gate") if self.leaves == 2 else ("reset gate", "keep gate", "")
        )
        gates = dict(zip(names, torch.stack(opened).chunk(len(names), -1), strict=True))
        return {"hidden state": torch.stack(shown)} | {name: gate for name, gate in gates.items() if name}

    def _segments(self, x: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
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
        carried = (row == 0)[None, :, None]
        packed = PackedSequence(x.flatten(0, 1)[source], alive.sum(1).cpu())
        y, after = self._call(packed, tuple(torch.where(carried, m[:, col], 0) for m in memory))

        back = torch.empty_like(source)
        back[source] = torch.arange(len(source), device=x.device)
        last = (row + length == T).nonzero().squeeze(1)  # the segment that ends the chunk, per column
        last = last[col[last].argsort()]
        return y.data[back].view(T, B, -1), tuple(m[:, last] for m in after)


@dataclass(frozen=True)
class Gated:
    """What LSTM and GRU let one choose."""

    hidden: int | None = 256
    """units per layer; None: as wide as the input"""
    layers: int = 1
    chrono: int | None = None
    """first biases such that memory lasts for about so many rows (chrono initialisation); None: as `init` says"""
    init: Literal["torch", "orthogonal"] = "torch"
    """first weights: PyTorch's, or orthogonal with biases of zero"""
    bptt: int | None = None
    """rows the gradient flows back through memory; None: the whole chunk"""

    def __post_init__(self) -> None:
        check_sizes(self, "hidden", "layers")
        check_bptt(self.bptt)
        if self.chrono is not None and self.chrono < 2:
            raise UserError(f"core.chrono={self.chrono} must be at least 2 rows")
