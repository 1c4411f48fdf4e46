"""Soft actor-critic for discrete actions (Christodoulou 2019), with memory (Ni et al. 2023)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from bestiary.algos.base import Agent, apply_gradient, core_parameter_groups, normalized_weights
from bestiary.algos.burn_in import burn_in_state, split_burn_in
from bestiary.algos.exploration import Explorer, FixedExploration
from bestiary.algos.settings import (
    check_burn_in,
    check_fractions,
    check_layers,
    check_positive,
    check_target_network,
    discount_factor,
)
from bestiary.algos.target_network import TargetNetwork
from bestiary.config.schema import Counts
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net, Torso, head
from bestiary.nets.optim import Adam, LrSchedule, OptimizerConfig
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.policy import sample
from bestiary.ops.program import Program
from bestiary.replay.uniform import Uniform, UniformBuilder
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Update, transitions


class SacAgent(Agent):
    """A torso and a policy head. The critics belong to the learner and are not sent to actors."""

    def __init__(self, spec: Spec, net: Net, core: CoreConfig, hidden: Sequence[int]) -> None:
        super().__init__()
        self.spec, self.net, self.core = spec, net, core
        self.torso = Torso(spec, net, core)
        self.policy = head(self.torso.width, hidden, spec.num_actions, last=1e-3, init=net.init)

    def initial_state(self, batch_size: int) -> State:
        return self.torso.initial_state(batch_size)

    def compile_to(self, program: Program) -> int | None:
        h = self.torso.compile_to(program)
        return None if h is None else program.layers(self.policy, h)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        h, state = self.torso(TimeStep(*(x[None] for x in step)), state)
        logits = self.policy(h[0])
        return (logits.argmax(-1) if explore is None else sample(logits, rng)), {}, state


@dataclass(frozen=True)
class SacDiscrete:
    """SAC-Discrete (Christodoulou 2019) on sequences or whole episodes: a policy, twin critics and an entropy bonus."""

    replay: Uniform = field(default_factory=Uniform)
    unroll: int = 20
    """steps that each environment plays between two rounds of updates"""
    discount: float | None = 0.99
    """discount factor gamma; None: 1 - 1 / (maximum episode length)"""
    temperature: float = 0.1
    """temperature alpha of the entropy bonus, where it is fixed"""
    entropy_target: float | None = None
    """target entropy as a fraction of its maximum log(actions): the temperature is learnt, from 1; None: fixed"""
    shared_encoder: bool = False
    """one encoder and core for policy and critics"""
    freeze_critic: bool = False
    """with a shared encoder: no gradient of the policy loss through the critics"""
    target_encoder: bool = False
    """target networks of encoder and core too; else targets use the online ones"""
    burn_in: int = 0
    """burn-in length in steps: unrolled without gradient to refresh the recurrent state"""
    td_weight_exponent: float = 0.0
    """critic loss weights abs(TD error)^exponent, normalised over the batch; 0: all transitions weigh the same"""
    tau: float | None = 0.005
    """Polyak averaging coefficient of the target network, per update; None: copy every `target_update_period`"""
    target_update_period: int | None = None
    """target network update period: updates between two copies to the target network"""
    head: Counts = (256, 256)
    """hidden layer sizes of the policy and the critics, after the core"""
    grad_norm: float | None = None
    """gradient clipping by global norm; None: off"""
    optimizer: OptimizerConfig = field(default_factory=lambda: Adam(lr=3e-4))
    """optimiser of all parameters"""
    core_lr: float | None = None
    """learning rate of the core's parameters; None: as all others"""
    lr_decay: Literal["linear", "none"] = "none"
    """learning rate schedule: linear decay to zero over the frame budget, or none"""

    def __post_init__(self) -> None:
        if self.unroll < 1:
            raise UserError(f"algo.unroll={self.unroll} must be at least 1")
        if self.temperature <= 0:
            raise UserError(f"algo.temperature={self.temperature} must be positive")
        if self.td_weight_exponent < 0:
            raise UserError(f"algo.td-weight-exponent={self.td_weight_exponent} must be at least 0")
        check_fractions(self, "discount", "tau", "entropy_target")
        check_positive(self, "target_update_period", "grad_norm", "core_lr")
        check_target_network(self.tau, self.target_update_period)
        check_layers(self.head)
        check_burn_in(self.burn_in, self.replay.sequence_length)

    def replay_builder(self, num_streams: int) -> UniformBuilder:
        return UniformBuilder(self.replay, num_streams, self.unroll)

    def explorer(self, num_envs: int) -> Explorer:
        return FixedExploration(torch.zeros(num_envs))  # exploration is the policy's own

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> SacAgent:
        return SacAgent(spec, net, core, self.head)

    def learner(self, agent: Agent, total_steps: int) -> "SacLearner":
        assert isinstance(agent, SacAgent)
        self.replay.check_fits(agent.spec)
        return SacLearner(self, agent, total_steps)


class Critics(nn.Module):
    """Twin critics, of which the smaller Q-value counts: features [..., W] -> [2, ..., A]."""

    def __init__(self, agent: SacAgent, hidden: Sequence[int]) -> None:
        super().__init__()
        actions, width = agent.spec.num_actions, agent.torso.width
        self.heads = nn.ModuleList(head(width, hidden, actions, last=3e-3, init=agent.net.init) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        return torch.stack([q(h) for q in self.heads])


class SacLearner:
    """One gradient step for encoders, cores, critics and policy together.

    A shared encoder and core learn from the critic loss and the policy loss. `freeze_critic` stops the gradient of the
    policy loss through the Q-values; with separate encoders it is always stopped.
    """

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: SacDiscrete, agent: SacAgent, total_steps: int) -> None:
        self.cfg = cfg
        self.agent = agent
        self.discount = discount_factor(cfg.discount, agent.spec)
        device = next(agent.parameters()).device
        self.critics = Critics(agent, cfg.head).to(device)
        self.torso = agent.torso if cfg.shared_encoder else Torso(agent.spec, agent.net, agent.core).to(device)
        self.target = TargetNetwork(self.critics, cfg.tau, cfg.target_update_period)
        self.target_torso = TargetNetwork(self.torso, cfg.tau, cfg.target_update_period) if cfg.target_encoder else None
        start = 0.0 if cfg.entropy_target is not None else math.log(cfg.temperature)
        self.log_temperature = nn.Parameter(torch.tensor(start, device=device))
        # the agent comes last: its torso may be the critics', and `parameters` lists each parameter once
        self.modules = nn.ModuleDict({"torso": self.torso, "critics": self.critics, "agent": agent})
        groups = core_parameter_groups(self.modules, cfg.core_lr)
        if cfg.entropy_target is not None:
            self.modules.register_parameter("log_temperature", self.log_temperature)
            groups[0]["params"].append(self.log_temperature)
        self.optimizer = cfg.optimizer.build(groups)
        total_updates = total_steps * cfg.replay.updates_per_step
        self.lr_schedule = LrSchedule(self.optimizer, total_updates if cfg.lr_decay == "linear" else None)
        self.updates = 0

    def loss(self, t: Trajectory) -> tuple[Tensor, Metrics]:
        """Loss and metrics; with several learners each returns its part: losses and metrics add up."""
        cfg = self.cfg
        past, t = split_burn_in(t, cfg.burn_in)
        m = transitions(t.step, self.discount)
        weight = normalized_weights(m.valid.to(m.reward.dtype), self.collective)
        temperature = self.log_temperature.exp().detach()

        h, _ = self.torso(t.step, burn_in_state(self.torso, past, t.state))
        own = self.agent.torso
        policy_h = h if cfg.shared_encoder else own(t.step, burn_in_state(own, past, t.state))[0]
        log_pi = self.agent.policy(policy_h).log_softmax(-1)
        pi = log_pi.exp()
        q = self.critics(h[:-1])  # [2, T, B, A]

        with torch.no_grad():
            next_h = h[1:]
            if self.target_torso is not None:
                torso: Torso = self.target_torso.module  # type: ignore
                next_h = torso(t.step, burn_in_state(torso, past, t.state))[0][1:]
            soft_q = self.target.module(next_h).amin(0) - temperature * log_pi[1:]
            y = m.reward + m.discount * (pi[1:] * soft_q).sum(-1)
        value = q.gather(-1, t.action[None, :-1, :, None].expand(2, -1, -1, -1)).squeeze(-1)
        error = value - y
        td_weight = normalized_weights(m.valid * error.detach().abs() ** cfg.td_weight_exponent, self.collective)
        critic_loss = 0.5 * (td_weight * error.square()).sum()

        q_min = q.amin(0)
        if cfg.freeze_critic or not cfg.shared_encoder:
            q_min = q_min.detach()
        policy_loss = (weight * (pi[:-1] * (temperature * log_pi[:-1] - q_min)).sum(-1)).sum()
        entropy = (weight * -(pi[:-1] * log_pi[:-1]).sum(-1)).sum()
        loss = critic_loss + policy_loss
        if cfg.entropy_target is not None:
            target_entropy = cfg.entropy_target * math.log(self.agent.spec.num_actions)
            loss = loss + self.log_temperature.exp() * (entropy.detach() - self.collective.fraction * target_entropy)
        return loss, {
            "loss": loss.detach(),
            "critic_loss": critic_loss.detach(),
            "policy_loss": policy_loss.detach(),
            "entropy": entropy.detach(),
            "temperature": self.collective.fraction * temperature,
            "q": (weight * value.detach().mean(0)).sum(),
        }

    def update(self, batch: Batch) -> Update:
        self.lr_schedule.at(self.updates)
        loss, metrics = self.loss(batch.trajectory)
        norm = apply_gradient(loss, self.modules, self.optimizer, self.cfg.grad_norm, self.updates + 1, self.collective)
        metrics = self.collective.all_reduce_sum(metrics)
        self.updates += 1
        self.target.update(self.updates)
        if self.target_torso is not None:
            self.target_torso.update(self.updates)
        return Update(metrics | {"grad_norm": norm})

    def _modules(self) -> dict[str, nn.Module]:
        """The modules that a checkpoint needs beside the agent."""
        modules = {"critics": self.critics, "target": self.target.module}
        if not self.cfg.shared_encoder:
            modules["torso"] = self.torso
        if self.target_torso is not None:
            modules["target_torso"] = self.target_torso.module
        return modules

    def state_dict(self) -> Snapshot:
        return {
            **{name: module.state_dict() for name, module in self._modules().items()},
            "log_temperature": self.log_temperature.detach(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Snapshot) -> None:
        for name, module in self._modules().items():
            module.load_state_dict(state[name])
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
