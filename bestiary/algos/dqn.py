"""DQN with memory: Q-learning from uniform replay of sequences or whole episodes (Mnih et al. 2015)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bestiary.algos.base import Agent, normalized_weights
from bestiary.algos.exploration import CountBasedExploration, Explorer, FixedExploration
from bestiary.algos.q_learning import QAgent, QLearner, QLearning, q_metrics
from bestiary.algos.settings import check_burn_in, check_fractions, per_horizon
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.replay.uniform import Uniform, UniformBuilder
from bestiary.types import Batch, Metrics, Spec


@dataclass(frozen=True)
class Dqn(QLearning):
    """DQN (Mnih et al. 2015): double Q-learning from uniform replay with a target network, recurrent if the core is."""

    replay: Uniform = field(default_factory=Uniform)
    trace_decay: float = 0.0
    """lambda of Watkins's Q(lambda); 0: n-step targets"""
    td_weight_exponent: float = 0.0
    """loss weights abs(TD error)^exponent, normalised over the batch; 0: all transitions weigh the same"""
    epsilon_first: float = 1.0
    """epsilon of epsilon-greedy exploration at the start"""
    epsilon_last: float | None = None
    """epsilon after the linear schedule; None: 1 / (maximum episode length)"""
    epsilon_fraction: float = 0.1
    """fraction of the frame budget over which epsilon falls linearly (exploration schedule)"""
    count_epsilon: float | None = None
    """count-based exploration: epsilon is at least this / n for what an episode shows n times on average; None: off"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions(self, "trace_decay", "epsilon_first", "epsilon_last", "epsilon_fraction", "count_epsilon")
        check_burn_in(self.burn_in, self.replay.sequence_length)
        if self.td_weight_exponent < 0:
            raise UserError(f"algo.td-weight-exponent={self.td_weight_exponent} must be at least 0")
        if self.trace_decay and self.n_step > 1:
            raise UserError(
                f"algo.trace-decay={self.trace_decay} and algo.n-step={self.n_step} exclude each other: "
                "set the one to 0 or the other to 1"
            )

    def replay_builder(self, num_streams: int) -> UniformBuilder:
        return UniformBuilder(self.replay, num_streams, self.unroll)

    def explorer(self, num_envs: int) -> Explorer:
        # the linear schedule travels with the weights: see QAgent.epsilon
        return (
            FixedExploration(torch.zeros(num_envs))
            if self.count_epsilon is None
            else CountBasedExploration(self.count_epsilon)
        )

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> QAgent:
        agent = QAgent(spec, net, core, self.head, self.dueling)
        agent.epsilon.fill_(self.epsilon_first)
        return agent

    def learner(self, agent: Agent, total_steps: int) -> "DqnLearner":
        assert isinstance(agent, QAgent)
        self.replay.check_fits(agent.spec)
        return DqnLearner(self, agent, total_steps)


class DqnLearner(QLearner):
    """Epsilon falls linearly over the first part of the budget."""

    cfg: Dqn

    def __init__(self, cfg: Dqn, agent: QAgent, total_steps: int) -> None:
        super().__init__(cfg, agent, total_steps)
        self.first = cfg.epsilon_first
        self.last = per_horizon(agent.spec, "epsilon-last") if cfg.epsilon_last is None else cfg.epsilon_last
        self.last_update = max(1.0, cfg.epsilon_fraction * total_steps * cfg.replay.updates_per_step)

    def epsilon(self) -> float:
        return self.first + (self.last - self.first) * min(1.0, self.updates / self.last_update)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics, None]:
        td = self.td_targets(batch.trajectory, trace_decay=self.cfg.trace_decay)
        distance = (td.value.detach() - td.target).abs()
        weight = normalized_weights(td.valid * distance**self.cfg.td_weight_exponent, self.collective)
        loss = (weight * self.error(td)).sum()
        return loss, q_metrics(td, loss, normalized_weights(td.valid.to(loss.dtype), self.collective)), None
