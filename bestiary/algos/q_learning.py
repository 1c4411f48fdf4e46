"""Learning the worth of actions from stored experience: what DQN and its descendants share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.algos.base import Agent, apply_gradient
from bestiary.algos.off_policy import OffPolicy, Target, parameter_groups, share, split, up_to_date
from bestiary.cores.base import CoreConfig
from bestiary.nets import Net, Torso, head
from bestiary.ops.policy import epsilon_greedy
from bestiary.ops.returns import watkins
from bestiary.types import Batch, Metrics, Snapshot, Spec, State, TimeStep, Trajectory, Update, moves

if TYPE_CHECKING:
    from bestiary.tape import Tape


class QAgent(Agent):
    """Torso, then a value per action. How much to explore is a buffer, so it travels with the weights."""

    picks = "epsilon_greedy"
    epsilon: Tensor

    def __init__(self, spec: Spec, net: Net, core: CoreConfig, hidden: Sequence[int]) -> None:
        super().__init__()
        self.spec = spec
        self.torso = Torso(spec, net, core)
        self.head = head(self.torso.width, hidden, spec.num_actions, last=3e-3, init=net.init)
        self.register_buffer("epsilon", torch.tensor(1.0))

    def initial_state(self, batch_size: int) -> State:
        return self.torso.initial_state(batch_size)

    def forward(self, step: TimeStep, state: State) -> tuple[Tensor, State]:
        h, state = self.torso(step, state)
        return self.head(h), state  # [T, B, A]

    def to_tape(self, tape: "Tape") -> int | None:
        h = self.torso.to_tape(tape)
        return None if h is None else tape.layers(self.head, h)

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        """explore: the least probability of an action at random, whatever the schedule says."""
        q, state = self(TimeStep(*(x[None] for x in step)), state)
        if explore is None:
            return q[0].argmax(-1), {}, state
        return epsilon_greedy(q[0], torch.maximum(self.epsilon, explore), rng), {}, state


@dataclass(frozen=True)
class QLearning(OffPolicy):
    double: bool = True
    """the online network chooses the next action that the target values"""
    trace_decay: float = 0.0
    """lambda of Watkins's traces; 0: one-step targets"""
    huber: bool = False
    """errors beyond 1 count linearly; else their squares"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_shares("trace_decay")


class QLearner:
    """Double Q-learning with traces: one forward of the online network and one of the target per update.

    The online values are computed once, with gradient, for all rows: they choose the best next actions and are
    themselves what is corrected.
    """

    def __init__(self, cfg: QLearning, agent: QAgent, total_steps: int) -> None:
        self.cfg = cfg
        self.agent = agent
        self.discount = cfg.discount_for(agent.spec)
        self.target = Target(agent, cfg)
        self.optimizer = cfg.optimizer.build(parameter_groups(agent, cfg.memory_lr))
        self.pace = cfg.pace(self.optimizer, total_steps)
        self.updates = 0

    def epsilon(self) -> float:
        """The probability of an action at random from now on."""
        raise NotImplementedError

    def loss(self, t: Trajectory) -> tuple[Tensor, Metrics]:
        cfg, target = self.cfg, self.target.module
        past, t = split(t, cfg.burn_in)
        m = moves(t.step, self.discount)
        q, _ = self.agent(t.step, up_to_date(self.agent.torso, past, t.state))
        with torch.no_grad():
            target_q, _ = target(t.step, up_to_date(target.torso, past, t.state))  # type: ignore
            best = q[1:].argmax(-1)
            chosen = best if cfg.double else target_q[1:].argmax(-1)
            next_value = target_q[1:].gather(-1, chosen[..., None]).squeeze(-1)
            y = watkins(m.reward, m.discount, m.valid, next_value, t.action[1:] == best, cfg.trace_decay)
        value = q[:-1].gather(-1, t.action[:-1, :, None]).squeeze(-1)
        error = F.huber_loss(value, y, reduction="none") if cfg.huber else (value - y).square()
        distance = (value.detach() - y).abs()
        loss = (share(m.valid * distance**cfg.focus) * error).sum()
        even = share(m.valid.to(value.dtype))
        return loss, {
            "loss": loss.detach(),
            "q": (even * value.detach()).sum(),
            "td_error": (even * distance).sum(),
        }

    def update(self, batch: Batch) -> Update:
        self.pace.at(self.updates)
        loss, metrics = self.loss(batch.trajectory)
        norm = apply_gradient(loss, self.agent, self.optimizer, self.cfg.grad_norm, self.updates + 1)
        self.updates += 1
        self.target.follow(self.updates)
        self.agent.epsilon.fill_(self.epsilon())
        return Update(metrics | {"grad_norm": norm, "epsilon": self.agent.epsilon.clone()})

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
