"""R2D2: recurrent Q-learning from prioritized replay of sequences (Kapturowski et al. 2019)."""
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bestiary.algos.base import Agent, normalized_weights
from bestiary.algos.burn_in import split_burn_in
from bestiary.algos.exploration import Explorer, FixedExploration, per_actor_epsilon
from bestiary.algos.q_learning import QAgent, QLearner, QLearning, TdResult, q_metrics
from bestiary.config.schema import Counts
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.nets.optim import Adam, OptimizerConfig
from bestiary.ops.priorities import sequence_priority
from bestiary.replay.prioritized import Prioritized, PrioritizedBuilder
from bestiary.types import Batch, Metrics, Spec, State, Trajectory


@dataclass(frozen=True)
class R2d2(QLearning):
    """Recurrent replay distributed DQN: prioritized replay of sequences with stored recurrent state and burn-in."""

    replay: Prioritized = field(
        default_factory=lambda: Prioritized(
            batch_size=64,
            updates_per_step=0.00015,
            priority_exponent=0.9,
            importance_exponent=0.6,
            sequence_length=120,
            stored_state=None,
            eta=0.9,
        )
    )
    unroll: int = 40
    discount: float | None = 0.997
    n_step: int = 5
    dueling: bool = True
    burn_in: int = 40
    value_rescale_eps: float | None = 1e-3
    tau: float | None = None
    target_update_period: int | None = 2_500
    head: Counts = (512,)
    grad_norm: float | None = 40.0
    optimizer: OptimizerConfig = field(default_factory=lambda: Adam(lr=1e-4, eps=1e-3))
    epsilon_base: float = 0.4
    """epsilon-greedy exploration: epsilon of environment i of N is base^(1 + alpha i / (N - 1)) (Ape-X 0.4)"""
    epsilon_alpha: float = 7.0
    """alpha of the per-environment epsilon schedule (Ape-X 7)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_prioritized(self, self.replay, self.epsilon_base)

    def replay_builder(self, num_streams: int) -> PrioritizedBuilder:
        return prioritized_builder(self, self.replay, num_streams)

    def explorer(self, num_envs: int) -> Explorer:
        return FixedExploration(per_actor_epsilon(num_envs, self.epsilon_base, self.epsilon_alpha))

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> QAgent:
        return recording_agent(self, self.replay, spec, net, core)

    def learner(self, agent: Agent, total_steps: int) -> "R2d2Learner":
        assert isinstance(agent, QAgent)
        return R2d2Learner(self, self.replay, agent, total_steps)


# -- what Ape-X and R2D2 share: `cfg` is either's ---------------------------------------------------------------------


def check_prioritized(cfg: QLearning, replay: Prioritized, epsilon_base: float) -> None:
    if not 0 <= epsilon_base <= 1:
        raise UserError(f"algo.epsilon-base={epsilon_base} must lie in [0, 1]")
    if cfg.discount is None:
        raise UserError("algo.discount=None is not known to a replay that computes initial priorities: give a number")
    if cfg.burn_in < 0:
        raise UserError(f"algo.burn-in={cfg.burn_in} must be at least 0")
    replay.check_sequences(cfg.burn_in, cfg.n_step, cfg.unroll)


def prioritized_builder(cfg: QLearning, replay: Prioritized, num_streams: int) -> PrioritizedBuilder:
    return PrioritizedBuilder(
        replay, num_streams, cfg.unroll, cfg.burn_in, cfg.n_step, partial(initial_priorities, cfg, replay)
    )


def initial_priorities(cfg: QLearning, replay: Prioritized, t: Trajectory) -> Tensor:
    """Priorities of new items, [B], from the Q-values that the actor recorded: no network is evaluated for them."""
    assert cfg.discount is not None
    _, t = split_burn_in(t, cfg.burn_in)
    m = cfg.transitions(t.step, cfg.discount)
    length = replay.trained_length(cfg.burn_in)
    returns = cfg.n_step_return(m, length)
    q = t.aux["q"]
    target = cfg.rescale(returns.target(cfg.unscale(q.amax(-1).gather(0, returns.bootstrap_step))))
    value = q[:length].gather(-1, t.action[:length, :, None]).squeeze(-1)
    return sequence_priority(value - target, m.valid[:length], replay.eta)


def recording_agent(cfg: QLearning, replay: Prioritized, spec: Spec, net: Net, core: CoreConfig) -> QAgent:
    """A Q-network whose actors record Q-values, for initial priorities, and have an epsilon each."""
    if net.frame_stack - 1 > cfg.burn_in and not replay.stored_state:
        raise UserError(
            f"algo.burn-in={cfg.burn_in} steps do not fill net.frame-stack={net.frame_stack}: "
            f"raise it to {net.frame_stack - 1}"
        )
    agent = QAgent(spec, net, core, cfg.head, cfg.dueling, record_q=True)
    agent.epsilon.zero_()  # exploration is the explorer's: see per_actor_epsilon
    return agent


class R2d2Learner(QLearner):
    """Importance-weighted Q-learning that returns new priorities; for sequences (R2D2) or transitions (Ape-X)."""

    def __init__(self, cfg: QLearning, replay: Prioritized, agent: QAgent, total_steps: int) -> None:
        super().__init__(cfg, agent, total_steps)
        self.replay = replay
        self.length = replay.trained_length(cfg.burn_in)

    def epsilon(self) -> float:
        return 0.0

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor]:
        t = batch.trajectory
        td = self.td_targets(t, self.length)
        error = self.error(td) if self.cfg.huber else self.error(td) / 2  # half of squares, as in both papers
        # sums over time: a transition counts as much in a short sequence as in a long one
        fraction = self.collective.batch_fraction(td.valid.shape[1])
        loss = (self.importance_weights(batch) * (td.valid * error).sum(0)).mean() * fraction
        priorities = sequence_priority(td.value.detach() - td.target, td.valid, self.replay.eta)
        metrics = q_metrics(td, loss, normalized_weights(td.valid.to(loss.dtype), self.collective))
        return loss, metrics | self.staleness(td, t.aux["q"][self.cfg.burn_in], batch.actor_state), priorities

    def importance_weights(self, batch: Batch) -> Tensor:
        """[B]: each replay's weights are at most 1; with several learners, the largest of all replays is 1."""
        assert batch.weight is not None
        largest = batch.info.get("max_importance_weight", torch.ones((), device=batch.weight.device))
        return batch.weight * (largest / self.collective.all_reduce_max(largest))

    def staleness(self, td: TdResult, actor_q: Tensor, actor_state: State) -> Metrics:
        """How far Q-values and recurrent state after the burn-in are from those the actor had at the same step.

        With several learners each returns its part of the mean over learners.
        """
        q, actor_q = (x if self.agent.legal is None else x[:, self.agent.legal] for x in (td.first_q, actor_q))
        best_q = actor_q.amax(-1)
        metrics: Metrics = {
            "q_discrepancy": relative_distance([q], [actor_q]) * actor_q.norm() / best_q.norm().clamp(min=1e-6)
        }
        if any(leaf.is_floating_point() for leaf in actor_state):
            metrics["state_discrepancy"] = relative_distance(td.state, actor_state)
        return {name: self.collective.fraction * x for name, x in metrics.items()}


def relative_distance(x: State | list[Tensor], reference: State | list[Tensor]) -> Tensor:
    """||x - reference|| / ||reference||, without images (stacked frames)."""
    pairs = [(a, b) for a, b in zip(x, reference, strict=True) if a.is_floating_point()]
    distance = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
    size = torch.stack([b.square().sum() for _, b in pairs]).sum()
    return (distance / size.clamp(min=1e-12)).sqrt()
