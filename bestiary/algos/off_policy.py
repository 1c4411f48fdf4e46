"""What algorithms that learn from stored experience share: how it is drawn, slow targets, memory's own rate."""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bestiary.config.compat import copy_all, lerp_all
from bestiary.config.schema import Count, Counts
from bestiary.errors import UserError
from bestiary.nets import Torso
from bestiary.nets.optim import Adam, LrSchedule, OptimizerConfig
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.replay.uniform import Uniform
from bestiary.types import Spec, State, TimeStep, Trajectory


@dataclass(frozen=True)
class OffPolicy:
    """Numbers that every algorithm with a replay has."""

    unroll: int = 20
    """moves each environment plays between two rounds of updates"""
    batch_size: int = 64
    """episodes, or windows, per update"""
    burn_in: int = 0
    """rows at the start of a window that only bring memory up to date"""
    capacity: Count = 1_000_000
    """moves kept"""
    warmup: Count = 1_000
    """moves before the first update"""
    ratio: float = 0.25
    """updates per move"""
    discount: float | None = 0.99
    """None: one minus one over the longest episode"""
    tau: float | None = 0.005
    """share of the way the target follows after every update; None: by `period`"""
    period: int | None = None
    """updates between two copies to the target"""
    head: Counts = (256, 256)
    """units of the layers after memory"""
    grad_norm: float | None = None
    """clip the gradient to this norm"""
    optimizer: OptimizerConfig = field(default_factory=lambda: Adam(lr=3e-4))
    memory_lr: float | None = None
    """learning rate of the memory; None: as everything else"""
    lr_decay: Literal["linear", "none"] = "none"
    """linear: learning rates fall to nothing over the budget"""

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise UserError(f"algo.unroll={self.unroll} must be at least 1")
        self.check_shares("discount", "tau")
        self.check_positive("period", "grad_norm", "memory_lr")
        if (self.tau is None) == (self.period is None):
            raise UserError(
                "set one of algo.tau (follow slowly) and algo.period (copy now and then), and the other to None"
            )
        if any(units < 1 for units in self.head):
            raise UserError(f"algo.head={self.head} must be layers of at least one unit")

    def check_shares(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"algo.{name.replace('_', '-')}={value} must lie in [0, 1]")

    def check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"algo.{name.replace('_', '-')}={value} must be positive, or None")

    def discount_for(self, spec: Spec) -> float:
        return 1 - per_horizon(spec, "discount") if self.discount is None else self.discount

    def lr_schedule(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LrSchedule:
        return LrSchedule(optimizer, total_steps * self.ratio if self.lr_decay == "linear" else None)


@dataclass(frozen=True)
class FromUniform(OffPolicy):
    """Learns from whole episodes or windows, all equally likely."""

    window: int | None = None
    """moves per sample; None: whole episodes"""
    stored_state: bool = False
    """windows begin with the memory the actor had there; else with an empty one"""
    focus: float = 0.0
    """moves weigh by their error to this power: a rare surprise counts among many moves that are understood"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.focus < 0:
            raise UserError(f"algo.focus={self.focus} must be at least 0")
        if self.burn_in < 0 or (self.burn_in and self.burn_in >= (self.window or 0)):
            raise UserError(f"algo.burn-in={self.burn_in} must be at least 0 and below algo.window={self.window}")

    def check_fits(self, spec: Spec) -> None:
        """Refuse what can never be sampled, where it is known how long an episode is."""
        if spec.horizon is None:
            return
        if self.window is not None and self.window > spec.horizon:
            raise UserError(
                f"algo.window={self.window} is longer than any episode of {spec.name} ({spec.horizon} moves): "
                "use None for whole episodes"
            )
        needed = self.batch_size * (self.window or spec.horizon)
        if self.capacity < needed:
            raise UserError(f"algo.capacity={self.capacity} is too small for one batch: it needs {needed} moves")

    def replay_builder(self, num_streams: int) -> Uniform:
        return Uniform(
            num_streams,
            self.batch_size,
            self.capacity,
            self.window,
            self.ratio,
            self.warmup,
            self.stored_state,
            self.unroll,
        )


def per_horizon(spec: Spec, flag: str) -> float:
    """One over the longest episode, for numbers that depend on it."""
    if spec.horizon is None:
        raise UserError(f"{spec.name} does not say how long its episodes can be: set --algo.{flag} to a number")
    return 1 / spec.horizon


class Target:
    """A copy of a module that follows it: a little after every update, or wholly after every so many."""

    def __init__(self, module: nn.Module, cfg: OffPolicy) -> None:
        self.source = module
        self.tau, self.period = cfg.tau, cfg.period
        self.module = copy.deepcopy(module).requires_grad_(False).eval()

    @torch.no_grad()
    def follow(self, updates: int) -> None:
        mine: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(self.source.parameters())
        if self.tau is not None:
            lerp_all(mine, theirs, self.tau)
        elif self.period is not None and updates % self.period == 0:
            copy_all(mine, theirs)


def parameter_groups(module: nn.Module, memory_lr: float | None) -> list[dict[str, Any]]:
    """Every parameter; those of memory with a rate of their own where one is given."""
    memory = [p for m in module.modules() if isinstance(m, Torso) for p in m.core.parameters()]
    if memory_lr is None or not memory:
        return [{"params": list(module.parameters())}]
    theirs = {id(p) for p in memory}
    rest = [p for p in module.parameters() if id(p) not in theirs]
    return [{"params": rest}, {"params": memory, "lr": memory_lr}]


def share(weight: Tensor, collective: Collective = SINGLE_PROCESS) -> Tensor:
    """[..., T, B]: of a batch, so that all its moves together count as one; of nothing, nothing."""
    everything = collective.all_reduce_sum(weight.sum((-2, -1), keepdim=True))
    return weight / everything.clamp(min=torch.finfo(weight.dtype).tiny)


def split(t: Trajectory, rows: int) -> tuple[TimeStep, Trajectory]:
    """The rows that bring memory up to date, and those to learn from."""
    past, rest = (TimeStep(*(x[part] for x in t.step)) for part in (slice(rows), slice(rows, None)))
    return past, t._replace(step=rest, action=t.action[rows:], aux={k: x[rows:] for k, x in t.aux.items()})


@torch.no_grad()
def burn_in_state(torso: Torso, past: TimeStep, state: State) -> State:
    """Memory after the rows before those that are learnt from."""
    state = state or torso.initial_state(past.is_first.shape[1])
    return torso.final_state(past, state) if len(past.is_first) else state
