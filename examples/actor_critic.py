"""An algorithm of your own: one-step advantage actor-critic (A2C) without corrections for off-policy data.

bestiary train recall --plugin examples/actor_critic.py algo:actor-critic --algo.unroll 22
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import bestiary
from bestiary.algos.base import Agent, apply_gradient
from bestiary.algos.exploration import Explorer, FixedExploration
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net, Torso
from bestiary.nets.optim import Adam, OptimizerConfig
from bestiary.ops.policy import entropy, log_prob, sample
from bestiary.replay.fifo import Fifo, FifoBuilder
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Update, transitions


class ActorCriticAgent(Agent):
    """What acts: policy and value heads on a torso. Its parameters are all that travels to actors."""

    def __init__(self, spec: Spec, net: Net, core: CoreConfig) -> None:
        super().__init__()
        self.torso = Torso(spec, net, core)  # encoder and core in one: the algorithm does not see which core it is
        self.policy = nn.Linear(self.torso.width, spec.num_actions)
        self.value = nn.Linear(self.torso.width, 1)

    def initial_state(self, batch_size: int) -> State:
        return self.torso.initial_state(batch_size)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        h, state = self.torso(TimeStep(*(x[None] for x in step)), state)  # one time step: T = 1
        logits = self.policy(h[0])
        action = logits.argmax(-1) if explore is None else sample(logits, rng)  # None: greedy
        return action, {}, state


class ActorCriticLearner:
    """What learns: the loss and the optimiser."""

    def __init__(self, cfg: "ActorCritic", agent: ActorCriticAgent) -> None:
        self.cfg, self.agent = cfg, agent
        self.optimizer = cfg.optimizer.build(agent)
        self.updates = 0

    def loss(self, t: Trajectory) -> tuple[Tensor, Metrics]:
        h, _ = self.agent.torso(t.step, t.state)  # [T+1, B, width]
        value = self.agent.value(h).squeeze(-1)  # [T+1, B]
        logits = self.agent.policy(h[:-1])
        m = transitions(t.step, self.cfg.discount)  # reward and discount of the transition from step t to t+1
        advantage = m.reward + m.discount * value[1:].detach() - value[:-1]
        log_pi = log_prob(logits, t.action[:-1])
        weight = m.valid / m.valid.sum().clamp(min=1)  # entries between two episodes carry no loss
        losses = advantage.square() - log_pi * advantage.detach() - self.cfg.entropy_cost * entropy(logits)
        total = (weight * losses).sum()
        return total, {"loss": total.detach(), "value": (weight * value[:-1]).sum().detach()}

    def update(self, batch: Batch) -> Update:
        loss, metrics = self.loss(batch.trajectory)
        norm = apply_gradient(loss, self.agent, self.optimizer, self.cfg.grad_norm, self.updates + 1)
        self.updates += 1
        return Update(metrics | {"grad_norm": norm})

    def state_dict(self) -> Snapshot:
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Snapshot) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


@dataclass(frozen=True)
class ActorCritic:
    """One-step advantage actor-critic: policy gradient with the TD error as advantage (Mnih et al. 2016)."""

    unroll: int = 20
    """T: transitions per trajectory, in agent steps"""
    replay: Fifo = field(default_factory=Fifo)
    discount: float = 0.99
    """discount factor gamma"""
    entropy_cost: float = 0.01
    """coefficient of the entropy bonus"""
    grad_norm: float = 40.0
    """maximum norm of the gradient"""
    optimizer: OptimizerConfig = field(default_factory=lambda: Adam(lr=1e-3))

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise UserError(f"algo.unroll={self.unroll} must be at least 1")
        if not 0 <= self.discount <= 1:
            raise UserError(f"algo.discount={self.discount} must lie in [0, 1]")

    def replay_builder(self, num_streams: int) -> FifoBuilder:
        return FifoBuilder(self.replay, num_streams)  # every trajectory is learnt from once

    def explorer(self, num_envs: int) -> Explorer:
        return FixedExploration(torch.zeros(num_envs))  # the policy is stochastic: no further exploration

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> ActorCriticAgent:
        return ActorCriticAgent(spec, net, core)

    def learner(self, agent: Agent, total_steps: int) -> ActorCriticLearner:
        assert isinstance(agent, ActorCriticAgent)
        return ActorCriticLearner(self, agent)


bestiary.register(algo=ActorCritic)
