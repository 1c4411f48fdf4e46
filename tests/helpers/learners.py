"""Small networks, random trajectories and a slow forward pass, shared by the tests of learners."""

from typing import Any

import torch
from torch import Tensor, nn

from bestiary.cores import Lstm
from bestiary.nets import Mlp, Net, Torso
from bestiary.types import Spec, State, TimeStep, Trajectory

HORIZON = 8
SPEC = Spec("toy", (3,), torch.float64, 4, horizon=HORIZON)
NET = Net(encoder=Mlp(hidden_size=6), action_units=5)
CORE = Lstm(hidden=5)


def experience(is_first: Tensor, is_terminal: Tensor, seed: int = 0, state: bool = False) -> Trajectory:
    T, B = is_first.shape
    rng = torch.Generator().manual_seed(seed)
    action = torch.randint(SPEC.num_actions, (T, B), generator=rng)
    before = torch.cat([torch.randint(SPEC.num_actions, (1, B), generator=rng), action[:-1]])
    step = TimeStep(
        obs=torch.randn(T, B, *SPEC.obs_shape, generator=rng),
        prev_action=torch.where(is_first, 0, before),
        reward=torch.where(is_first, 0, 2 * torch.randn(T, B, generator=rng)),
        is_first=is_first,
        is_terminal=is_terminal,
    )
    memory = tuple(torch.randn(B, 1, CORE.hidden or 0, generator=rng) for _ in range(2)) if state else ()
    return Trajectory(step, action, {}, memory, torch.zeros(B))


def windows(seed: int = 0, T: int = 9, B: int = 3, state: bool = False) -> Trajectory:
    """Sequences with episode boundaries, terminations and lost lives at random steps."""
    rng = torch.Generator().manual_seed(seed)
    is_first = torch.rand(T, B, generator=rng) < 0.2
    return experience(is_first, (torch.rand(T, B, generator=rng) < 0.2) & ~is_first, seed, state)


def episodes(seed: int = 0, lengths: tuple[int, ...] = (9, 4, 6)) -> Trajectory:
    """Whole episodes; shorter ones are padded with one-step episodes. The second one is truncated."""
    T = max(lengths)
    row, length = torch.arange(T)[:, None], torch.tensor(lengths)
    is_terminal = (row == length - 1) & (torch.arange(len(lengths)) != 1)
    return experience((row == 0) | (row >= length), is_terminal, seed)


def sequential(layers: nn.Module, x: Tensor) -> Tensor:
    """Linear, ReLU, linear, ..."""
    linear = [m for m in layers.modules() if isinstance(m, nn.Linear)]
    for layer in linear[:-1]:
        x = (layer.weight @ x + layer.bias).relu()
    return linear[-1].weight @ x + linear[-1].bias


def features(torso: Torso, step: TimeStep, b: int, state: State) -> tuple[list[Tensor], State]:
    """Encoder, previous reward and action, LSTM: one stream, step by step."""
    rnn: Any = torso.core.rnn
    h, c = (s[b, 0] for s in state) if state else (torch.zeros(CORE.hidden or 0) for _ in range(2))
    outputs = []
    for t in range(len(step.is_first)):
        first = bool(step.is_first[t, b])
        if first:
            h, c = torch.zeros_like(h), torch.zeros_like(c)
        hot = torch.zeros(SPEC.num_actions)
        if not first:
            hot[step.prev_action[t, b]] = 1
        seen = sequential(torso.encoder, step.obs[t, b]).relu()
        x = torch.cat([seen, step.reward[t, b].clamp(-1, 1)[None], sequential(torso.action, hot).relu()])
        gates = rnn.weight_ih_l0 @ x + rnn.bias_ih_l0 + rnn.weight_hh_l0 @ h + rnn.bias_hh_l0
        write, keep, new, show = gates.chunk(4)
        c = keep.sigmoid() * c + write.sigmoid() * new.tanh()
        h = show.sigmoid() * c.tanh()
        outputs.append(h)
    return outputs, (h[None, None], c[None, None])


def after_burn_in(torso: Torso, t: Trajectory, burn_in: int, b: int) -> list[Tensor]:
    """Features of the steps after burn-in; the burn-in steps only refresh the recurrent state."""
    past, rest = (TimeStep(*(x[part] for x in t.step)) for part in (slice(burn_in), slice(burn_in, None)))
    state = tuple(s[b : b + 1] for s in t.state)
    if burn_in:
        with torch.no_grad():
            one = TimeStep(*(x[:, b : b + 1] for x in past))
            _, state = features(torso, one, 0, state)
    return features(torso, TimeStep(*(x[:, b : b + 1] for x in rest)), 0, state)[0]


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(named.items(), found, strict=True)}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-8, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    assert a.keys() == b.keys()


def shaken(module: nn.Module, seed: int = 1) -> None:
    """Add noise to all weights, so that the outputs of freshly initialised heads differ from zero."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=rng))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
