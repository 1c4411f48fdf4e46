"""Learning the worth of actions from stored experience: what DQN, Ape-X and R2D2 share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.algos.base import Agent, apply_gradient
from bestiary.algos.off_policy import OffPolicy, Target, burn_in_state, parameter_groups, split
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets import Dueling, Net, Torso, gather_steps, head
from bestiary.ops.collective import SINGLE_PROCESS, Collective
from bestiary.ops.policy import RewardClip, clip_reward, epsilon_greedy
from bestiary.ops.program import Program
from bestiary.ops.returns import NStep, n_step, watkins_q_lambda
from bestiary.ops.value_rescaling import value_rescale, value_rescale_inverse
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Transitions, Update, transitions

if TYPE_CHECKING:
    pass


class QAgent(Agent):
    """Torso, then a value per action. How much to explore is a buffer, so it travels with the weights.

    Actions that do nothing in a game are worth less than any other, and never tried out.
    """

    picks = "epsilon_greedy"
    epsilon: Tensor
    legal: Tensor | None
    forbidden: Tensor

    def __init__(
        self, spec: Spec, net: Net, core: CoreConfig, hidden: Sequence[int], dueling: bool = False, keeps: bool = False
    ) -> None:
        super().__init__()
        self.spec = spec
        self.keeps = "q" if keeps else None
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
        return self.values(h), state  # [T, B, A]

    def at(self, step: TimeStep, state: State, rows: Tensor) -> Tensor:
        """Of some rows alone, [K, B] -> [K, B, A]."""
        return self.values(self.torso.features_at(step, state, rows))

    def values(self, h: Tensor) -> Tensor:
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
        """explore: the least probability of an action at random, whatever the schedule says."""
        q, state = self(TimeStep(*(x[None] for x in step)), state)
        aux = {self.keeps: q[0]} if self.keeps else {}
        if explore is None:
            return q[0].argmax(-1), aux, state
        return epsilon_greedy(q[0], torch.maximum(self.epsilon, explore), rng, self.legal), aux, state


@dataclass(frozen=True)
class QLearning(OffPolicy):
    double: bool = True
    """the online network chooses the next action that the target values"""
    dueling: bool = False
    """values as one of the row and one of each action there"""
    n_step: int = 1
    """rewards in a target before the value of the row they lead to"""
    rescale: float | None = None
    """epsilon of the function that squeezes values, so that scores of any size can be learnt; None: as they are"""
    reward_clip: RewardClip = "none"
    huber: bool = False
    """errors beyond 1 count linearly; else their squares"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_step < 1:
            raise UserError(f"algo.n-step={self.n_step} must be at least 1")
        self.check_positive("rescale")

    def transitions(self, step: TimeStep, discount: float) -> Transitions:
        m = transitions(step, discount)
        return m._replace(reward=clip_reward(m.reward, self.reward_clip))

    def reach(self, m: Transitions, length: int) -> NStep:
        return n_step(*m, self.n_step, length)

    def worth(self, q: Tensor) -> Tensor:
        """What the network means."""
        return q if self.rescale is None else value_rescale_inverse(q, self.rescale)

    def said(self, value: Tensor) -> Tensor:
        """How the network should say it."""
        return value if self.rescale is None else value_rescale(value, self.rescale)


class Judged(NamedTuple):
    """What was said of moves, and what should have been."""

    value: Tensor  # [L, B]
    target: Tensor
    valid: Tensor
    first: Tensor  # [B, A] values of the first row
    state: State  # memory before it


class QLearner:
    """Double Q-learning with n-step targets: one forward of the online network and one of the target per update.

    The online values are computed once, with gradient, for all rows: they choose the best next actions and are
    themselves what is corrected. Where rows do not depend on each other, and few of them are trained, only those are
    looked at, and those they lead to.
    """

    collective: Collective = SINGLE_PROCESS

    def __init__(self, cfg: QLearning, agent: QAgent, total_steps: int) -> None:
        self.cfg = cfg
        self.agent = agent
        self.discount = cfg.discount_for(agent.spec)
        self.target = Target(agent, cfg)
        self.optimizer = cfg.optimizer.build(parameter_groups(agent, cfg.memory_lr))
        self.lr_schedule = cfg.lr_schedule(self.optimizer, total_steps)
        self.updates = 0

    def epsilon(self) -> float:
        """The probability of an action at random from now on."""
        raise NotImplementedError

    def weigh(self, batch: Batch) -> tuple[Tensor, Metrics, Tensor | None]:
        """The loss, what a log should tell, and priorities, where there are such.

        Of several learners, one's part: losses and metrics add up.
        """
        raise NotImplementedError

    def judge(self, t: Trajectory, length: int | None = None, trace_decay: float = 0.0) -> Judged:
        """The first `length` moves after the burn-in; None: all."""
        cfg, target = self.cfg, self.target.module
        assert isinstance(target, QAgent)
        past, t = split(t, cfg.burn_in)
        state = burn_in_state(self.agent.torso, past, t.state)
        target_state = burn_in_state(target.torso, past, t.state)
        m = cfg.transitions(t.step, self.discount)
        length = len(m.reward) if length is None else length
        reach = cfg.reach(m, length)
        if self.agent.torso.memoryless and not trace_decay and 2 * length < len(t.action):
            trained = torch.arange(length, device=reach.bootstrap_step.device)[:, None].expand_as(reach.bootstrap_step)
            q = self.agent.at(t.step, state, trained)
            with torch.no_grad():
                ahead, beyond = (
                    a.at(t.step, s, reach.bootstrap_step) for a, s in ((self.agent, state), (target, target_state))
                )
        else:
            q, _ = self.agent(t.step, state)
            with torch.no_grad():
                beyond, _ = target(t.step, target_state)
            ahead = q.detach()
            if trace_decay:
                ahead, beyond = ahead[1:], beyond[1:]
            else:
                ahead, beyond = gather_steps(ahead, reach.bootstrap_step), gather_steps(beyond, reach.bootstrap_step)
        best = (ahead if cfg.double else beyond).argmax(-1)
        next_value = cfg.worth(beyond.gather(-1, best[..., None]).squeeze(-1))
        if trace_decay:
            y = watkins_q_lambda(*m, next_value, t.action[1:] == ahead.argmax(-1), trace_decay)
        else:
            y = reach.target(next_value)
        value = q[:length].gather(-1, t.action[:length, :, None]).squeeze(-1)
        return Judged(value, cfg.said(y), m.valid[:length], q[0].detach(), state)

    def error(self, j: Judged) -> Tensor:
        if self.cfg.huber:
            return F.huber_loss(j.value, j.target, reduction="none")
        return (j.value - j.target).square()

    def update(self, batch: Batch) -> Update:
        self.lr_schedule.at(self.updates)
        loss, metrics, priorities = self.weigh(batch)
        norm = apply_gradient(loss, self.agent, self.optimizer, self.cfg.grad_norm, self.updates + 1, self.collective)
        metrics = self.collective.all_reduce_sum(metrics)
        self.updates += 1
        self.target.follow(self.updates)
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


def report(j: Judged, loss: Tensor, weight: Tensor) -> Metrics:
    """What a log should tell; weight [L, B] of all learners adds up to one."""
    return {
        "loss": loss.detach(),
        "q": (weight * j.value.detach()).sum(),
        "td_error": (weight * (j.value.detach() - j.target).abs()).sum(),
    }
