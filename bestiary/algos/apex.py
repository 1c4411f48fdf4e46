"""Ape-X DQN: prioritized replay of transitions, and an epsilon per environment (Horgan et al. 2018)."""

from dataclasses import dataclass, field

from bestiary.algos.base import Agent
from bestiary.algos.exploration import Explorer, FixedExploration, per_actor_epsilon
from bestiary.algos.q_learning import QAgent, QLearning
from bestiary.algos.r2d2 import R2d2Learner, check_prioritized, prioritized_builder, recording_agent
from bestiary.config.schema import Counts
from bestiary.cores.base import CoreConfig
from bestiary.nets import Net
from bestiary.nets.optim import Adam, OptimizerConfig
from bestiary.replay.prioritized import Prioritized, PrioritizedBuilder
from bestiary.types import Spec


@dataclass(frozen=True)
class Apex(QLearning):
    """Ape-X DQN: double, dueling Q-learning from prioritized transitions. A core's memory spans the burn-in only."""

    replay: Prioritized = field(default_factory=Prioritized)
    n_step: int = 3
    dueling: bool = True
    burn_in: int = 3
    """burn-in length in steps: they fill the frame stack and the recurrent state before each transition"""
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

    def learner(self, agent: Agent, total_steps: int) -> R2d2Learner:
        assert isinstance(agent, QAgent)
        return R2d2Learner(self, self.replay, agent, total_steps)
