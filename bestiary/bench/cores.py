"""Speed of the cores: fast-weight rules against the plain loop, whole cores against an LSTM, and acting steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bestiary.bench import medians
from bestiary.config.machine import cores as usable_cores
from bestiary.config.machine import tune_malloc
from bestiary.cores import DeltaNet, DeltaRnn, Gpt, Gru, LinearTransformer, Lstm, RecurrentDeltaNet
from bestiary.cores.base import Core, CoreConfig
from bestiary.ops import fastweights
from bestiary.ops.fastweights import chunked, loops
from bestiary.ops.fastweights.loops import RULES, Recurrence


@dataclass(frozen=True)
class CoresBench:
    """bestiary bench cores"""

    batch: int = 32
    """batch size in environment streams"""
    heads: int = 8
    """number of heads"""
    head_width: int = 32
    """width of a head"""
    rounds: int = 7
    """timings per alternative (at T = 512: three); medians are reported"""
    threads: int | None = None
    """CPU threads; None: all cores"""


def rule_sides(cfg: CoresBench, rule: str, T: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of one rule in each of its forms, with a few resets inside the chunk."""
    torch.manual_seed(0)
    B, H, D = cfg.batch, cfg.heads, cfg.head_width
    columns = {"linear_transformer": 3 * D, "delta_rnn": 5 * D + 2}.get(rule, 3 * D + 1)
    x = torch.randn(T, B, H, columns, requires_grad=True)
    reset = torch.rand(T, B) < 0.02
    W = torch.zeros(B, H, D, D)
    weights = [torch.randn(H, D, D) / D**0.5 for _ in range(3)] + [torch.randn(H, D) / D**0.5]
    R = Recurrence(*(w.requires_grad_() for w in weights))
    y0, g = torch.zeros(B, H, D), torch.randn(T, B, H, D)

    def side(form: Any) -> Callable[[], object]:
        def run() -> None:
            wanted: list[Tensor] = [x]
            if rule == "recurrent_delta_net":
                y, wanted = form.recurrent_delta_net(x, R, reset, W, y0)[0], [x, *R]
            elif rule == "delta_rnn":
                y = form.delta_rnn(x, reset, W, W, y0)[0]
            else:
                y = getattr(form, rule)(x, reset, W)[0]
            torch.autograd.grad(y, wanted, g)

        return run

    sides = {"loop": side(loops), "fast": side(fastweights)}
    if hasattr(chunked, rule):
        sides["chunked"] = side(chunked)
    return sides


def learn_side(core: nn.Module, T: int, B: int, width: int) -> Callable[[], object]:
    """Forward and backward of a whole core (or a plain nn.LSTM) on one chunk."""
    torch.manual_seed(0)
    x = torch.randn(T, B, width, requires_grad=True)
    is_first = torch.rand(T, B) < 0.02
    state = core.initial_state(B) if isinstance(core, Core) else None
    wanted = [x, *core.parameters()]

    def run() -> None:
        y = core(x, is_first, state)[0] if isinstance(core, Core) else core(x)[0]
        torch.autograd.grad(y.sum(), wanted)

    return run


def act_side(core: Core, B: int, width: int) -> Callable[[], object]:
    """Twenty chunks of one step, as in acting."""
    x, no_reset = torch.randn(1, B, width), torch.zeros(1, B, dtype=torch.bool)
    state = core.initial_state(B)

    @torch.no_grad()
    def run() -> None:
        memory = state
        for _ in range(20):
            _, memory = core(x, no_reset, memory)

    return run


def parameters(core: nn.Module) -> int:
    return sum(p.numel() for p in core.parameters())


def lstm_of(count: int, width: int) -> nn.LSTM:
    """The LSTM on inputs of this width whose number of parameters is closest to `count`."""
    sizes = range(8, 2048, 8)
    hidden = min(sizes, key=lambda h: abs(4 * h * (width + h + 2) - count))
    return nn.LSTM(width, hidden)


def gpt_side(core: Core, B: int, width: int, t: int) -> Callable[[], object]:
    """The step at position t, twenty times."""
    *rings, count = core.initial_state(B)
    x, no_reset = torch.randn(1, B, width), torch.zeros(1, B, dtype=torch.bool)

    @torch.no_grad()
    def run() -> None:
        for _ in range(20):
            core(x, no_reset, (*rings, count + t))

    return run


def milliseconds(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    return {name: 1000 * s for name, s in medians(sides, rounds).items()}


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def rules(cfg: CoresBench, width: int) -> dict[str, Any]:
    """Table: every rule in each of its forms, and an LSTM."""
    results: dict[str, Any] = {}
    setting = f"B={cfg.batch}, {cfg.heads} heads x {cfg.head_width}, {torch.get_num_threads()} threads"
    table = new_table(
        f"rules: ms, forward + backward, {setting}",
        "rule",
        "T",
        "loop",
        "chunked",
        "fast form",
        "speedup",
        f"nn.LSTM {width}",
    )
    for T in (50, 80, 512):
        plain = learn_side(nn.LSTM(width, width), T, cfg.batch, width)
        for rule in RULES:
            rounds = cfg.rounds if T < 512 else 3
            ms = milliseconds(rule_sides(cfg, rule, T) | {"lstm": plain}, rounds)
            results[f"{rule}-{T}"] = ms
            other = f"{ms['chunked']:.1f}" if "chunked" in ms else "-"
            ratio = f"{ms['loop'] / ms['fast']:.1f}x"
            table.add_row(rule, str(T), f"{ms['loop']:.0f}", other, f"{ms['fast']:.1f}", ratio, f"{ms['lstm']:.1f}")
    Console(width=120).print(table)
    return results


def whole(cfg: CoresBench, width: int) -> dict[str, Any]:
    """Table: every core, learning and acting, beside an LSTM."""
    results: dict[str, Any] = {}
    fast: dict[str, Any] = {"width": width, "heads": cfg.heads, "layers": 1, "feedforward": 2 * width}
    configs: dict[str, CoreConfig] = {
        "lstm": Lstm(hidden=width),
        "gru": Gru(hidden=width),
        "gpt": Gpt(width=width, heads=cfg.heads, layers=1, window=128, feedforward=2 * width),
        "linear-transformer": LinearTransformer(**fast),
        "delta-net": DeltaNet(**fast),
        "recurrent-delta-net": RecurrentDeltaNet(**fast),
        "delta-rnn": DeltaRnn(**fast),
    }
    table = new_table(
        f"whole cores of width {width}, one layer: ms", "core", "weights", "T", "learning", "LSTM of as many weights",
        "acting step", f"acting step, LSTM {width}", "ratio",
    )  # fmt: skip
    lstm = Lstm(hidden=width).build(width)
    for name, config in configs.items():
        core = config.build(width)
        acting = milliseconds(
            {"core": act_side(core, cfg.batch, width), "lstm": act_side(lstm, cfg.batch, width)}, cfg.rounds
        )
        acting = {side: value / 20 for side, value in acting.items()}
        for T in (50, 80, 512):
            sides = {
                "core": learn_side(core, T, cfg.batch, width),
                "lstm": learn_side(lstm_of(parameters(core), width), T, cfg.batch, width),
            }
            ms = milliseconds(sides, cfg.rounds if T < 512 else 3)
            results[f"{name}-{T}"] = ms | {"act": acting["core"], "act_lstm": acting["lstm"]}
            shown = [f"{acting['core']:.2f}", f"{acting['lstm']:.2f}", f"{acting['core'] / acting['lstm']:.2f}"]
            table.add_row(
                name,
                f"{parameters(core):,}",
                str(T),
                f"{ms['core']:.1f}",
                f"{ms['lstm']:.1f}",
                *(shown if T == 50 else ["", "", ""]),
            )
    Console(width=120).print(table)
    return results


def resets(cfg: CoresBench, width: int) -> dict[str, Any]:
    """Table: LSTM and GRU with resets inside the chunk, beside PyTorch's fused call."""
    results: dict[str, Any] = {}
    table = new_table(
        f"resets inside the chunk (2% of steps): ms, T = 80, width {width}",
        "core",
        "plain call",
        "with resets",
        "ratio",
    )
    for name, config, plain in (
        ("lstm", Lstm(hidden=width), nn.LSTM(width, width)),
        ("gru", Gru(hidden=width), nn.GRU(width, width)),
    ):
        core = config.build(width)
        ms = milliseconds(
            {"plain": learn_side(plain, 80, cfg.batch, width), "starts": learn_side(core, 80, cfg.batch, width)},
            cfg.rounds,
        )
        results[name] = ms
        table.add_row(name, f"{ms['plain']:.1f}", f"{ms['starts']:.1f}", f"{ms['starts'] / ms['plain']:.2f}")
    Console(width=120).print(table)
    return results


def attention_length(cfg: CoresBench, width: int) -> dict[str, Any]:
    """Table: an acting step of the GPT, early and late in an episode."""
    results: dict[str, Any] = {}
    title = f"GPT of width {width}, one layer, window 1,024: ms of the acting step at position t"
    table = new_table(title, "t", "step")
    core = Gpt(width=width, heads=cfg.heads, layers=1, window=1024, feedforward=2 * width).build(width).eval()
    sides = {str(t): gpt_side(core, cfg.batch, width, t) for t in (1, 64, 256, 1000)}
    for t, value in milliseconds(sides, cfg.rounds).items():
        results[t] = value / 20
        table.add_row(t, f"{value / 20:.2f}")
    Console(width=120).print(table)
    return results


def main(cfg: CoresBench) -> dict[str, Any]:
    tune_malloc()
    torch.set_num_threads(cfg.threads or usable_cores())
    width = cfg.heads * cfg.head_width
    tables = {"rules": rules, "cores": whole, "resets": resets, "gpt": attention_length}
    return {name: table(cfg, width) for name, table in tables.items()}
