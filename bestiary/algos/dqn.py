"""Deep Q-networks with a memory: learn what actions are worth from everything remembered (Mnih et al. 2015)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer, Fixed, Novelty
from bestiary.algos.off_policy import FromUniform, per_horizon, share
from bestiary.algos.q_learning import QAgent, QLearner, QLearning, report
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net
from bestiary.types import Batch, Metrics, Spec, Trajectory


class DqnLearner(QLearner):
    """Explores less and less: linearly, over the first part of the budget."""

    cfg: "Dqn"

    def __init__(self, cfg: "Dqn", agent: QAgent, total_steps: int) -> None:
        super().__init__(cfg, agent, total_steps)
        self.first = cfg.epsilon_first
        self.last = per_horizon(agent.spec, "epsilon-last") if cfg.epsilon_last is None else cfg.epsilon_last
        self.until = max(1.0, cfg.epsilon_fraction * total_steps * cfg.ratio)  # updates

    def epsilon(self) -> float:
        return self.first + (self.last - self.first) * min(1.0, self.updates / self.until)

    def weigh(self, batch: Batch) -> tuple[Tensor, Metrics, None]:
        return *self.loss(batch.trajectory), None

    def loss(self, t: Trajectory) -> tuple[Tensor, Metrics]:
        j = self.judge(t, trace_decay=self.cfg.trace_decay)
        distance = (j.value.detach() - j.target).abs()
        loss = (share(j.valid * distance**self.cfg.focus, self.collective) * self.error(j)).sum()
        return loss, report(j, loss, share(j.valid.to(loss.dtype), self.collective))


@dataclass(frozen=True)
class Dqn(QLearning, FromUniform):
    """Q-learning from uniform replay, double and with a slow target; on windows or whole episodes."""

    trace_decay: float = 0.0
    """lambda of Watkins's traces; 0: targets of n steps"""
    epsilon_first: float = 1.0
    epsilon_last: float | None = None
    """None: one over the longest episode"""
    epsilon_fraction: float = 0.1
    """of the budget, over which exploration falls"""
    novelty: float | None = None
    """least chance of an action at random in what an episode shows once; an nth of it in what it shows n times"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_shares("trace_decay", "epsilon_first", "epsilon_last", "epsilon_fraction", "novelty")
        if self.trace_decay and self.n_step > 1:
            raise UserError(
                f"algo.trace-decay={self.trace_decay} and algo.n-step={self.n_step} exclude each other: "
                "set the one to 0 or the other to 1"
            )

    def explorer(self, num_envs: int) -> Explorer:
        return Fixed(torch.zeros(num_envs)) if self.novelty is None else Novelty(self.novelty)

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> QAgent:
        agent = QAgent(spec, net, core, self.head, self.dueling)
        agent.epsilon.fill_(self.epsilon_first)
        return agent

    def learner(self, agent: Agent, total_steps: int) -> DqnLearner:
        assert isinstance(agent, QAgent)
        self.check_fits(agent.spec)
        return DqnLearner(self, agent, total_steps)
