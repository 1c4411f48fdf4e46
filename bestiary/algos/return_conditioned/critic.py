"""The critic of commands that are advantages: V(s), trained on TD(lambda) targets."""

import torch
from torch import Tensor, nn

from bestiary.algos.return_conditioned.agent import ReturnConditionedAgent
from bestiary.config.schema import Counts
from bestiary.nets import Torso, head
from bestiary.ops.returns import lambda_returns
from bestiary.types import State, TimeStep, Transitions


class Critic(nn.Module):
    """V(s) in units of value_scale, with an encoder and a core of its own, of the same kinds as the agent's."""

    def __init__(self, agent: ReturnConditionedAgent, hidden: Counts) -> None:
        super().__init__()
        self.torso = Torso(agent.spec, agent.net, agent.core)
        self.head = head(self.torso.width, hidden, 1, last=1e-2, init=agent.net.init)

    def forward(self, step: TimeStep, state: State) -> Tensor:
        return self.head(self.torso(step, state)[0]).squeeze(-1)


def value_targets(
    m: Transitions, next_value: Tensor, value_scale: float, trace_decay: float, bootstrap_truncated: bool
) -> Tensor:
    """TD(lambda) targets of whole episodes, [T, B], in units of `value_scale`.

    bootstrap_truncated=False: the value after a time limit is zero, as in the public code.
    """
    discount = m.discount
    if not bootstrap_truncated:
        continues = torch.cat([m.valid[1:], torch.zeros_like(m.valid[:1])])
        discount = discount * continues
    return lambda_returns(m.reward / value_scale, discount, m.valid, next_value, trace_decay)
