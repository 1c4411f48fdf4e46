"""The LSTM and GRU core: one fused call per chunk, also when episodes begin inside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bestiary.cores.base import Core, check_bptt, check_sizes
from bestiary.errors import UserError
from bestiary.ops import program as opcodes
from bestiary.ops.program import Program
from bestiary.types import State


class GatedCore(Core):
    """An nn.LSTM or nn.GRU with resets. State: h (and c for the LSTM), each [B, layers, width]."""

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
        """For each layer: bias_ih and bias_hh, each [gates * width]."""
        for layer in range(self.rnn.num_layers):
            yield getattr(self.rnn, f"bias_ih_l{layer}"), getattr(self.rnn, f"bias_hh_l{layer}")

    @torch.no_grad()
    def init_orthogonal(self) -> None:
        """Orthogonal weights (Saxe et al. 2014) and zero biases."""
        for name, p in self.rnn.named_parameters():
            nn.init.orthogonal_(p) if name.startswith("weight") else p.zero_()

    def chrono_bias(self, t_max: int) -> Tensor:
        """Chrono initialisation: forget gate biases log(U(1, T_max - 1)) (Tallec & Ollivier 2018)."""
        return torch.empty(self.width).uniform_(1, max(2, t_max - 1)).log()

    def forward(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        if self.bptt is None:
            return self._chunk(x, is_first, state)
        outputs = []
        for piece, first in zip(x.split(self.bptt), is_first.split(self.bptt), strict=True):
            y, state = self._chunk(piece, first, tuple(s.detach() for s in state))
            outputs.append(y)
        return torch.cat(outputs), state

    def compile_to(self, program: Program, x: int) -> int:
        n, hidden, layers = self.rnn.input_size, self.width, self.rnn.num_layers
        memory = program.memory(self.leaves * layers * hidden)
        for layer, (bias_ih, bias_hh) in enumerate(self.biases()):
            weight_ih, weight_hh = (getattr(self.rnn, f"weight_{side}_l{layer}") for side in ("ih", "hh"))
            sources = [lambda w=weight_ih: w.t(), lambda w=weight_hh: w.t()]
            h = memory + layer * hidden
            if self.leaves == 2:
                y = program.alloc(5 * hidden)
                w = program.weights(*sources, lambda a=bias_ih, b=bias_hh: a + b)
                program.emit(opcodes.LSTM, y, x, n, hidden, w, h, h + layers * hidden)
            else:
                y = program.alloc(7 * hidden)
                w = program.weights(*sources, lambda a=bias_ih: a, lambda b=bias_hh: b)
                program.emit(opcodes.GRU, y, x, n, hidden, w, h)
            x, n = y, hidden
        return x

    def _chunk(self, x: Tensor, is_first: Tensor, state: State) -> tuple[Tensor, State]:
        keep = ~is_first[0][:, None, None]
        memory = tuple(torch.where(keep, s, 0).transpose(0, 1).contiguous() for s in state)
        if not is_first[1:].any():
            y, memory = self._call(x, memory)
        elif x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
            y, memory = self._stepwise(x, is_first, memory)
        else:
            y, memory = self._packed(x, is_first, memory)
        return y, tuple(m.transpose(0, 1) for m in memory)

    def _call(self, x: Tensor | PackedSequence, memory: State) -> tuple[Tensor, State]:
        """Call the module; the state of nn.LSTM is a pair, that of nn.GRU a single tensor."""
        if self.leaves == 1:
            y, h = self.rnn(x, memory[0])
            return y, (h,)
        return self.rnn(x, memory)

    def _stepwise(self, x: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        """Layer by layer with the compiled gates of `ops.gates`, which support resets; fastest on a CPU."""
        from bestiary.ops import gates

        after: list[list[Tensor]] = []
        for layer, before in enumerate(zip(*memory, strict=True)):
            names = (f"{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            W, U, bias_ih, bias_hh = (getattr(self.rnn, name) for name in names)
            if self.leaves == 2:
                x, *final = gates.lstm(x, W, U, bias_ih + bias_hh, is_first, *before)
            else:
                x, *final = gates.gru(x, W, U, bias_ih, bias_hh, is_first, *before)
            after.append(final)
        return x, tuple(torch.stack(leaf) for leaf in zip(*after, strict=True))

    @torch.no_grad()
    def diagnostics(self, x: Tensor) -> dict[str, Tensor]:
        """Hidden state and gates of the last layer."""
        state, hidden, gate_values = self.initial_state(1), [], []
        last = self.rnn.num_layers - 1
        w_in, w_self = (getattr(self.rnn, f"weight_{kind}_l{last}") for kind in ("ih", "hh"))
        b_in, b_self = (getattr(self.rnn, f"bias_{kind}_l{last}") for kind in ("ih", "hh"))
        for step in x:
            before = state[0][:, last]
            y, state = self(step[None], torch.zeros(1, 1, dtype=torch.bool, device=x.device), state)
            layer_input = step if last == 0 else state[0][:, last - 1]
            gate_values.append((layer_input @ w_in.T + b_in + before @ w_self.T + b_self).sigmoid()[0])
            hidden.append(y[0, 0])
        names = (
            ("input gate", "forget gate", "", "output gate") if self.leaves == 2 else ("reset gate", "update gate", "")
        )
        gates = dict(zip(names, torch.stack(gate_values).chunk(len(names), -1), strict=True))
        return {"hidden state": torch.stack(hidden)} | {name: gate for name, gate in gates.items() if name}

    def _packed(self, x: Tensor, is_first: Tensor, memory: State) -> tuple[Tensor, State]:
        """One fused call over the segments of all episodes in the chunk, as a PackedSequence.

        Segments are sorted by decreasing length, so there is neither padding nor a Python loop over time.
        """
        T, B = is_first.shape
        segment_start = is_first.clone()
        segment_start[0] = True
        start, col = segment_start.t().nonzero().unbind(1)[::-1]  # starts, by column, then time
        end = torch.cat([start[1:], start.new_tensor([T])])
        end = torch.where(torch.cat([col[1:] != col[:-1], col.new_tensor([1]).bool()]), T, end)
        length, order = (end - start).sort(descending=True, stable=True)
        start, col = start[order], col[order]

        offset = torch.arange(int(length[0]), device=x.device)[:, None]  # [longest, 1]
        active = offset < length  # [longest, S]
        source = ((start + offset) * B + col)[active]  # index into the flattened chunk, in packed order
        continues = (start == 0)[None, :, None]
        packed = PackedSequence(x.flatten(0, 1)[source], active.sum(1).cpu())
        y, after = self._call(packed, tuple(torch.where(continues, m[:, col], 0) for m in memory))

        inverse = torch.empty_like(source)
        inverse[source] = torch.arange(len(source), device=x.device)
        last = (start + length == T).nonzero().squeeze(1)  # the last segment of each column
        last = last[col[last].argsort()]
        return y.data[inverse].view(T, B, -1), tuple(m[:, last] for m in after)


@dataclass(frozen=True)
class GatedConfig:
    """Settings shared by LSTM and GRU."""

    hidden: int | None = 256
    """hidden size: units per layer (PolyBeast: 256, R2D2: 512); None: the width of the input"""
    layers: int = 1
    """number of stacked layers"""
    chrono: int | None = None
    """T_max of chrono initialisation, in steps: memory time scales up to T_max (Tallec & Ollivier 2018); None: off"""
    init: Literal["torch", "orthogonal"] = "torch"
    """weight initialisation: PyTorch's default, or orthogonal weights with zero biases"""
    bptt: int | None = None
    """length of truncated BPTT in steps; None: the whole chunk"""

    def __post_init__(self) -> None:
        check_sizes(self, "hidden", "layers")
        check_bptt(self.bptt)
        if self.chrono is not None and self.chrono < 2:
            raise UserError(f"core.chrono={self.chrono} must be at least 2 steps")
