"""Deep Q-learning from replay, shared by DQN, Ape-X and R2D2: settings, Q-network and TD targets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.algos.base import Agent, apply_gradient, core_parameter_groups
from bestiary.algos.burn_in import burn_in_state, split_burn_in
from bestiary.algos.settings import (
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
from bestiary.nets import Dueling, Net, Torso, gather_steps, head
from bestiary.nets.optim import Adam, LrSchedule, OptimizerConfig
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.policy import RewardClip, clip_reward, epsilon_greedy
from bestiary.ops.program import Program
from bestiary.ops.returns import NStep, n_step, watkins_q_lambda
from bestiary.ops.value_rescaling import value_rescale, value_rescale_inverse
from bestiary.replay.prioritized import Prioritized
from bestiary.replay.uniform import Uniform
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Transitions, Update, transitions


@dataclass(frozen=True)
class QLearning:
    """Settings of Q-learning from replay."""

    replay: Uniform | Prioritized = field(default_factory=Uniform)
    unroll: int = 20
    """steps that each environment plays between two rounds of updates"""
    discount: float | None = 0.99
    """discount factor gamma; None: 1 - 1 / (maximum episode length)"""
    n_step: int = 1
    """n of the n-step return (Ape-X 3, R2D2 5)"""
    double: bool = True
    """double Q-learning: the online network selects the next action, the target network evaluates it"""
    dueling: bool = False
    """dueling heads: V(s) + A(s, a) - mean A (Wang et al. 2016)"""
    burn_in: int = 0
    """burn-in length in steps: unrolled without gradient to refresh the recurrent state (R2D2 40)"""
    value_rescale_eps: float | None = None
    """value rescaling h(x) = sign(x)(sqrt(abs(x) + 1) - 1) + eps x (Pohlen et al. 2018); None: off (R2D2 1e-3)"""
    reward_clip: RewardClip = "none"
    """reward clipping in the targets: abs_one clips to [-1, 1]; scores are always raw"""
    huber: bool = False
    """Huber loss, linear for TD errors beyond 1, in place of the squared TD error"""
    tau: float | None = 0.005
    """Polyak averaging coefficient of the target network, per update; None: copy every `target_update_period`"""
    target_update_period: int | None = None
    """target network update period: updates between two copies to the target network (Ape-X, R2D2 2500)"""
    head: Counts = (256, 256)
    """hidden layer sizes of the Q-value head, after the core"""
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
        if self.n_step < 1:
            raise UserError(f"algo.n-step={self.n_step} must be at least 1")
        check_fractions(self, "discount", "tau")
        check_positive(self, "target_update_period", "grad_norm", "core_lr", "value_rescale_eps")
        check_target_network(self.tau, self.target_update_period)
        check_layers(self.head)

    def transitions(self, step: TimeStep, discount: float) -> Transitions:
        m = transitions(step, discount)
        return m._replace(reward=clip_reward(m.reward, self.reward_clip))

    def n_step_return(self, m: Transitions, length: int) -> NStep:
        return n_step(*m, self.n_step, length)

    def rescale(self, value: Tensor) -> Tensor:
        """h: values on the scale of the network's outputs."""
        return value if self.value_rescale_eps is None else value_rescale(value, self.value_rescale_eps)

    def unscale(self, q: Tensor) -> Tensor:
        """h^-1: the network's outputs on the scale of returns."""
        return q if self.value_rescale_eps is None else value_rescale_inverse(q, self.value_rescale_eps)


class QAgent(Agent):
    """A torso and a Q-value per action, acting epsilon-greedily. Epsilon is a buffer, so it travels with the weights.

    Actions that do nothing in a game have Q-value -inf, and exploration never takes them.
    """

    action_selection = "epsilon_greedy"
    epsilon: Tensor
    legal: Tensor | None
    forbidden: Tensor

    def __init__(
        self, spec: Spec, net: Net, core: CoreConfig, hidden: Sequence[int], dueling: bool, record_q: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.output_key = "q" if record_q else None
        self.torso = Torso(spec, net, core)
        legal = torch.ones(spec.num_actions, dtype=torch.bool) if spec.legal is None else torch.tensor(spec.legal)
        if dueling:
            self.head = Dueling(self.torso.width, hidden, legal, net.init)
        else:
            self.head = head(self.torso.width, hidden, spec.num_actions, last=3e-3, init=net.init)
        self.register_buffer("epsilon", torch.tensor(1.0))
        self.register_buffer("legal", None if spec.legal is None else legal.nonzero()[:, 0], persistent=False)
        self.register_buffer("forbidden", ~legal, persistent=False)

    def initial_state(self, batch_size: int) -> State:
        return self.torso.initial_state(batch_size)

    def forward(self, step: TimeStep, state: State) -> tuple[Tensor, State]:
        h, state = self.torso(step, state)
        return self.q_values(h), state  # [T, B, A]

    def forward_at(self, step: TimeStep, state: State, index: Tensor) -> Tensor:
        """Q-values of the time steps `index` only, [K, B] -> [K, B, A]; for torsos without memory."""
        return self.q_values(self.torso.features_at(step, state, index))

    def q_values(self, h: Tensor) -> Tensor:
        q = self.head(h)
        return q if self.legal is None else q.masked_fill(self.forbidden, -torch.inf)

    def compile_to(self, program: Program) -> int | None:
        h = self.torso.compile_to(program) if self.legal is None else None
        if h is None:
            return None
        return self.head.compile_to(program, h) if isinstance(self.head, Dueling) else program.layers(self.head, h)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """explore: a lower bound of epsilon per environment, [B]; None: the greedy action."""
        q, state = self(TimeStep(*(x[None] for x in step)), state)
        aux = {self.output_key: q[0]} if self.output_key else {}
        if explore is None:
            return q[0].argmax(-1), aux, state
        return epsilon_greedy(q[0], torch.maximum(self.epsilon, explore), rng, self.legal), aux, state


class TdResult(NamedTuple):
    """Q-values of the actions taken and their TD targets, both on the network's scale."""

    value: Tensor  # [L, B] Q(s_t, a_t), with gradient
    target: Tensor  # [L, B]
    valid: Tensor  # [L, B]
    first_q: Tensor  # [B, A] Q-values of the first step after the burn-in
    state: State  # recurrent state after the burn-in


class QLearner:
    """n-step double Q-learning: one forward pass of the online network and one of the target network per update.

    The online Q-values of all steps are computed once, with gradient: they select the next actions and are themselves
    trained. A network without memory, of which few steps are trained, computes only those steps and the ones they
    bootstrap from.
    """

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: QLearning, agent: QAgent, total_steps: int) -> None:
        self.cfg = cfg
        self.agent = agent
        self.discount = discount_factor(cfg.discount, agent.spec)
        self.target = TargetNetwork(agent, cfg.tau, cfg.target_update_period)
        self.optimizer = cfg.optimizer.build(core_parameter_groups(agent, cfg.core_lr))
        total_updates = total_steps * cfg.replay.updates_per_step
        self.lr_schedule = LrSchedule(self.optimizer, total_updates if cfg.lr_decay == "linear" else None)
        self.updates = 0

    def epsilon(self) -> float:
        """Epsilon of the weights that actors get after this update."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor | None]:
        """Loss, metrics, and new priorities for a prioritized replay.

        With several learners each returns its part: losses and metrics add up.
        """
        raise NotImplementedError

    def td_targets(self, t: Trajectory, length: int | None = None, trace_decay: float = 0.0) -> TdResult:
        """Q-values and targets of the first `length` transitions after the burn-in; None: of all."""
        cfg, target = self.cfg, self.target.module
        assert isinstance(target, QAgent)
        past, t = split_burn_in(t, cfg.burn_in)
        state = burn_in_state(self.agent.torso, past, t.state)
        target_state = burn_in_state(target.torso, past, t.state)
        m = cfg.transitions(t.step, self.discount)
        length = len(m.reward) if length is None else length
        returns = cfg.n_step_return(m, length)
        step = returns.bootstrap_step  # [L, B]
        if self.agent.torso.memoryless and not trace_decay and 2 * length < len(t.action):
            trained = torch.arange(length, device=step.device)[:, None].expand_as(step)
            q = self.agent.forward_at(t.step, state, trained)
            with torch.no_grad():
                next_q = self.agent.forward_at(t.step, state, step)
                next_target_q = target.forward_at(t.step, target_state, step)
        else:
            q, _ = self.agent(t.step, state)
            with torch.no_grad():
                next_target_q, _ = target(t.step, target_state)
            next_q = q.detach()
            if trace_decay:
                next_q, next_target_q = next_q[1:], next_target_q[1:]
            else:
                next_q, next_target_q = gather_steps(next_q, step), gather_steps(next_target_q, step)
        next_action = (next_q if cfg.double else next_target_q).argmax(-1)
        next_value = cfg.unscale(next_target_q.gather(-1, next_action[..., None]).squeeze(-1))
        if trace_decay:
            y = watkins_q_lambda(*m, next_value, t.action[1:] == next_q.argmax(-1), trace_decay)
        else:
            y = returns.target(next_value)
        value = q[:length].gather(-1, t.action[:length, :, None]).squeeze(-1)
        return TdResult(value, cfg.rescale(y), m.valid[:length], q[0].detach(), state)

    def error(self, td: TdResult) -> Tensor:
        """Huber or squared TD error, [L, B]."""
        if self.cfg.huber:
            return F.huber_loss(td.value, td.target, reduction="none")
        return (td.value - td.target).square()

    def update(self, batch: Batch) -> Update:
        self.lr_schedule.at(self.updates)
        loss, metrics, priorities = self.loss(batch)
        norm = apply_gradient(loss, self.agent, self.optimizer, self.cfg.grad_norm, self.updates + 1, self.collective)
        metrics = self.collective.all_reduce_sum(metrics)
        self.updates += 1
        self.target.update(self.updates)
        self.agent.epsilon.fill_(self.epsilon())
        return Update(metrics | {"grad_norm": norm, "epsilon": self.agent.epsilon.clone()}, priorities)

    def state_dict(self) -> Snapshot:
        return {
            "target": self.target.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Snapshot) -> None:
        self.target.module.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]


def q_metrics(td: TdResult, loss: Tensor, weight: Tensor) -> Metrics:
    """Metrics for the log; weight [L, B] sums to one over all learners."""
    return {
        "loss": loss.detach(),
        "q": (weight * td.value.detach()).sum(),
        "td_error": (weight * (td.value.detach() - td.target).abs()).sum(),
    }
