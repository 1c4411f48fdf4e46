"""Soft actor-critic for discrete actions: be right, and stay as undecided as one can afford (Christodoulou 2019)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bestiary.algos.base import Agent, apply_gradient
from bestiary.algos.exploration import Explorer, Fixed
from bestiary.algos.off_policy import FromUniform, Target, burn_in_state, parameter_groups, share, split
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Net, Torso, head
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.policy import sample
from bestiary.ops.program import Program
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Update, transitions

if TYPE_CHECKING:
    pass


class SacAgent(Agent):
    """Torso, then a policy. It knows how to build critics of its own kind, but does not carry them."""

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


class Critics(nn.Module):
    """Two values per action on the same features, of which the smaller is believed: [..., W] -> [2, ..., A]."""

    def __init__(self, agent: SacAgent, hidden: Sequence[int]) -> None:
        super().__init__()
        actions, width = agent.spec.num_actions, agent.torso.width
        self.heads = nn.ModuleList(head(width, hidden, actions, last=3e-3, init=agent.net.init) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        return torch.stack([q(h) for q in self.heads])


class SacLearner:
    """One joint step for memory, critics and policy.

    With a shared encoder memory learns from critics and policy alike, and `freeze_critic` decides whether the policy's
    loss may also change what it is judged by. With separate encoders it never may.
    """

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: "SacDiscrete", agent: SacAgent, total_steps: int) -> None:
        self.cfg = cfg
        self.agent = agent
        self.discount = cfg.discount_for(agent.spec)
        device = next(agent.parameters()).device
        self.critics = Critics(agent, cfg.head).to(device)
        self.torso = agent.torso if cfg.shared_encoder else Torso(agent.spec, agent.net, agent.core).to(device)
        self.target = Target(self.critics, cfg)
        self.target_torso = Target(self.torso, cfg) if cfg.target_encoder else None
        start = 0.0 if cfg.entropy_target is not None else math.log(cfg.temperature)
        self.log_temperature = nn.Parameter(torch.tensor(start, device=device))
        # the agent last: its torso may be the critics', and a parameter counts once
        self.everything = nn.ModuleDict({"torso": self.torso, "critics": self.critics, "agent": agent})
        groups = parameter_groups(self.everything, cfg.memory_lr)
        if cfg.entropy_target is not None:
            self.everything.register_parameter("log_temperature", self.log_temperature)
            groups[0]["params"].append(self.log_temperature)
        self.optimizer = cfg.optimizer.build(groups)
        self.lr_schedule = cfg.lr_schedule(self.optimizer, total_steps)
        self.updates = 0

    def loss(self, t: Trajectory) -> tuple[Tensor, Metrics]:
        """Of several learners, one's part: losses and metrics add up."""
        cfg = self.cfg
        past, t = split(t, cfg.burn_in)
        m = transitions(t.step, self.discount)
        weight = share(m.valid.to(m.reward.dtype), self.collective)
        temperature = self.log_temperature.exp().detach()

        h, _ = self.torso(t.step, burn_in_state(self.torso, past, t.state))
        mine = h if cfg.shared_encoder else self.agent.torso(t.step, burn_in_state(self.agent.torso, past, t.state))[0]
        log_pi = self.agent.policy(mine).log_softmax(-1)
        pi = log_pi.exp()
        q = self.critics(h[:-1])  # [2, T, B, A]

        with torch.no_grad():
            behind = h[1:]
            if self.target_torso is not None:
                torso: Torso = self.target_torso.module  # type: ignore
                behind = torso(t.step, burn_in_state(torso, past, t.state))[0][1:]
            worth = self.target.module(behind).amin(0) - temperature * log_pi[1:]
            y = m.reward + m.discount * (pi[1:] * worth).sum(-1)
        value = q.gather(-1, t.action[None, :-1, :, None].expand(2, -1, -1, -1)).squeeze(-1)
        error = value - y
        focused = share(m.valid * error.detach().abs() ** cfg.focus, self.collective)
        critic_loss = 0.5 * (focused * error.square()).sum()

        judged = q.amin(0)
        if cfg.freeze_critic or not cfg.shared_encoder:
            judged = judged.detach()
        policy_loss = (weight * (pi[:-1] * (temperature * log_pi[:-1] - judged)).sum(-1)).sum()
        entropy = (weight * -(pi[:-1] * log_pi[:-1]).sum(-1)).sum()
        loss = critic_loss + policy_loss
        if cfg.entropy_target is not None:
            wanted = cfg.entropy_target * math.log(self.agent.spec.num_actions)
            loss = loss + self.log_temperature.exp() * (entropy.detach() - self.collective.fraction * wanted)
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
        norm = apply_gradient(
            loss, self.everything, self.optimizer, self.cfg.grad_norm, self.updates + 1, self.collective
        )
        metrics = self.collective.all_reduce_sum(metrics)
        self.updates += 1
        self.target.follow(self.updates)
        if self.target_torso is not None:
            self.target_torso.follow(self.updates)
        return Update(metrics | {"grad_norm": norm})

    def _modules(self) -> dict[str, nn.Module]:
        """What a checkpoint needs beside the agent."""
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


@dataclass(frozen=True)
class SacDiscrete(FromUniform):
    """A policy and twin critics, off-policy, with a bonus for entropy; on windows or whole episodes."""

    temperature: float = 0.1
    """of the entropy bonus, when it is fixed"""
    entropy_target: float | None = None
    """learn the temperature (from 1) so that entropy is this share of the largest; None: fixed"""
    shared_encoder: bool = False
    """one encoder and memory for policy and critics"""
    freeze_critic: bool = False
    """with a shared encoder: the policy's loss does not change the critics or, through them, memory"""
    target_encoder: bool = False
    """targets see through a slow copy of encoder and memory too, not through the current ones"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise UserError(f"algo.temperature={self.temperature} must be positive")
        self.check_shares("entropy_target")

    def explorer(self, num_envs: int) -> Explorer:
        return Fixed(torch.zeros(num_envs))  # the policy itself decides how much

    def agent(self, spec: Spec, net: Net, core: CoreConfig) -> SacAgent:
        return SacAgent(spec, net, core, self.head)

    def learner(self, agent: Agent, total_steps: int) -> SacLearner:
        assert isinstance(agent, SacAgent)
        self.check_fits(agent.spec)
        return SacLearner(self, agent, total_steps)
