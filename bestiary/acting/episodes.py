"""Runs a policy for a number of whole episodes, as evaluation needs them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bestiary.acting.actor import Actor
from bestiary.algos.base import Agent, AgentWrapper
from bestiary.algos.exploration import FixedExploration
from bestiary.envs.env_batch import EnvBatch
from bestiary.errors import UserError
from bestiary.ops.policy import epsilon_greedy
from bestiary.types import Episode, Mode, State, TimeStep

UNROLL = 32  # steps between two checks of which episodes have ended
MAX_ATTEMPTS = 20  # rejected episodes per requested one, before giving up


class EpsilonGreedyAgent(AgentWrapper):
    """An agent whose action is replaced by a uniformly random one with probability epsilon."""

    def __init__(self, agent: Agent, epsilon: float, num_actions: int) -> None:
        super().__init__(agent)
        self.epsilon = torch.tensor(epsilon)
        self.num_actions = num_actions

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        action, aux, state = self.agent.act(step, state, explore, rng)
        return epsilon_greedy(F.one_hot(action, self.num_actions), self.epsilon, rng), aux, state


def explore_rates(mode: Mode, num_envs: int) -> FixedExploration | None:
    """The explorer of an evaluation mode: None is greedy; a rate of 0 samples from the policy."""
    return None if mode == "greedy" else FixedExploration(torch.zeros(num_envs))


def quotas(episodes: int, slots: int) -> list[int]:
    """Number of episodes per slot. If the first episodes to end counted, short ones would be over-represented."""
    return [episodes // slots + (slot < episodes % slots) for slot in range(slots)]


@torch.no_grad()
def play_episodes(
    agent: Agent,
    env_batch: EnvBatch,
    episodes: int,
    mode: Mode,
    rng: torch.Generator,
    accept: Callable[[Episode], bool] = lambda e: True,
    stop: Callable[[], bool] = lambda: False,
    epsilon: float = 0.0,
) -> list[Episode]:
    """Run whole episodes until every slot has its quota of accepted ones, or until `stop` returns True."""
    n = env_batch.num_envs
    agent = EpsilonGreedyAgent(agent, epsilon, env_batch.spec.num_actions) if epsilon else agent
    quota = quotas(episodes, n)
    actor = Actor(env_batch, agent, explore_rates(mode, n), UNROLL, 0, rng.device)
    actor.rng = rng
    accepted: list[Episode] = []
    attempts = 0
    while any(quota) and not stop():
        for e in actor.unroll()[1]:
            attempts += quota[e.slot] > 0
            if quota[e.slot] > 0 and accept(e):
                quota[e.slot] -= 1
                accepted.append(e)
        if attempts > MAX_ATTEMPTS * episodes:
            raise UserError(
                f"only {len(accepted)} of {attempts} episodes had a positive score; {episodes} were requested"
            )
    return sorted(accepted, key=lambda e: e.slot)
