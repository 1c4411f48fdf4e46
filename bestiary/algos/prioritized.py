"""What Ape-X and R2D2 share: a rung of exploration for every environment, and replay by surprise."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer, Fixed, ladder
from bestiary.algos.off_policy import share, split
from bestiary.algos.q_learning import Judged, QAgent, QLearner, QLearning, report
from bestiary.config.schema import Count, Counts
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.nets.optim import Adam, OptimizerConfig
from bestiary.ops.priorities import sequence_priority
from bestiary.replay.prioritized import Prioritized
from bestiary.types import Batch, Metrics, Spec, State, Trajectory


class Item(NamedTuple):
    """What is drawn."""

    length: int  # moves that are trained
    stride: int  # rows between the beginnings of two
    eta: float  # of the largest error in its priority; the rest is of their mean
    stored_state: bool | None  # whether it begins with the memory of the actor; None: where there is room


@dataclass(frozen=True)
class FromPriorities(QLearning):
    """Learns most from what surprised it most; weights undo how often that is drawn."""

    unroll: int = 40
    burn_in: int = 0
    capacity: Count = 1_000_000
    warmup: Count = 50_000
    tau: float | None = None
    period: int | None = 2_500
    head: Counts = (512,)
    dueling: bool = True
    n_step: int = 3
    grad_norm: float | None = 40.0
    optimizer: OptimizerConfig = field(default_factory=lambda: Adam(lr=1e-4, eps=1e-3))
    alpha: float = 0.6
    """how much priorities decide what is drawn: 0 not at all, 1 wholly"""
    beta: float = 0.4
    """how much of that is undone by weighing what is drawn often less"""
    priority_floor: float = 1e-6
    """the least priority: what is understood is still drawn now and then"""
    eviction: Literal["fifo", "priority"] = "fifo"
    """which rows make room for new ones: the oldest, or the trajectory of the lowest priority"""
    epsilon_base: float = 0.4
    """chance of an action at random in the boldest environment"""
    epsilon_alpha: float = 7.0
    """in the least bold one it is the base to the power of one more than this"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_shares("alpha", "beta", "epsilon_base")
        self.check_positive("priority_floor")
        if self.discount is None:
            raise UserError("algo.discount=None is not known to a replay that judges by surprise: give a number")
        if self.burn_in < 0:
            raise UserError(f"algo.burn-in={self.burn_in} must be at least 0")

    @property
    def item(self) -> Item:
        raise NotImplementedError

    def replay_builder(self, num_streams: int) -> Prioritized:
        return Prioritized(
            streams=num_streams,
            batch_size=self.batch_size,
            capacity=self.capacity,
            burn_in=self.burn_in,
            length=self.item.length,
            n_step=self.n_step,
            stride=self.item.stride,
            ratio=self.ratio,
            warmup=self.warmup,
            judge=self.first_priorities,
            alpha=self.alpha,
            beta=self.beta,
            floor=self.priority_floor,
            stored_state=self.item.stored_state,
            unroll=self.unroll,
            eviction=self.eviction,
        )

    def first_priorities(self, t: Trajectory) -> Tensor:
        """By the values the actor had when it chose: no pass through the network is made for them."""
        assert self.discount is not None
        _, t = split(t, self.burn_in)
        m = self.transitions(t.step, self.discount)
        length = self.item.length
        reach = self.reach(m, length)
        q = t.aux["q"]
        y = self.said(reach.target(self.worth(q.amax(-1).gather(0, reach.bootstrap_step))))
        value = q[:length].gather(-1, t.action[:length, :, None]).squeeze(-1)
        return sequence_priority(value - y, m.valid[:length], self.item.eta)

    def explorer(self, num_envs: int) -> Explorer:
        return Fixed(ladder(num_envs, self.epsilon_base, self.epsilon_alpha))

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> QAgent:
        if net.frame_stack - 1 > self.burn_in and not self.item.stored_state:
            raise UserError(
                f"algo.burn-in={self.burn_in} rows do not fill net.frame-stack={net.frame_stack}: "
                f"raise it to {net.frame_stack - 1}"
            )
        agent = QAgent(spec, net, core, self.head, self.dueling, keeps=True)
        agent.epsilon.zero_()  # each environment has its rung
        return agent

    def learner(self, agent: Agent, total_steps: int) -> "PriorityLearner":
        assert isinstance(agent, QAgent)
        return PriorityLearner(self, agent, total_steps)


class PriorityLearner(QLearner):
    cfg: FromPriorities

    def epsilon(self) -> float:
        return 0.0

    def weigh(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor]:
        t = batch.trajectory
        j = self.judge(t, self.cfg.item.length)
        error = self.error(j) if self.cfg.huber else self.error(j) / 2  # half of squares, as both papers have it
        # sums over time: a move counts as much in a short sequence as in a long one
        loss = (self.weight(batch) * (j.valid * error).sum(0)).mean() * self.collective.batch_fraction(j.valid.shape[1])
        priorities = sequence_priority(j.value.detach() - j.target, j.valid, self.cfg.item.eta)
        metrics = report(j, loss, share(j.valid.to(loss.dtype), self.collective))
        return loss, metrics | self.staleness(j, t.aux["q"][self.cfg.burn_in], batch.reached), priorities

    def weight(self, batch: Batch) -> Tensor:
        """A replay counts nothing more than once: what is heaviest there may not be so among all of several."""
        assert batch.weight is not None
        heaviest = batch.about.get("heaviest", torch.ones((), device=batch.weight.device))
        return batch.weight * (heaviest / self.collective.all_reduce_max(heaviest))

    def staleness(self, j: Judged, acted: Tensor, reached: State) -> Metrics:
        """How far values, and memory after the burn-in, are from those the actor had at the same row.

        Of several learners, the mean of what each finds in its own part.
        """
        mine, theirs = (q if self.agent.legal is None else q[:, self.agent.legal] for q in (j.first, acted))
        told = {"q_discrepancy": apart([mine], [theirs]) * theirs.norm() / theirs.amax(-1).norm().clamp(min=1e-6)}
        if any(leaf.is_floating_point() for leaf in reached):
            told["state_discrepancy"] = apart(j.state, reached)
        return {name: self.collective.fraction * x for name, x in told.items()}


def apart(mine: State | list[Tensor], theirs: State | list[Tensor]) -> Tensor:
    """Distance as a share of what should have been; pictures aside."""
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.is_floating_point()]
    off = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
    size = torch.stack([b.square().sum() for _, b in pairs]).sum()
    return (off / size.clamp(min=1e-12)).sqrt()
