"""Runs a tested policy for whole episodes, and compares its action distribution with a reference policy's."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bestiary.acting.actor import Actor
from bestiary.acting.episodes import UNROLL, explore_rates, quotas
from bestiary.algos.base import Agent, AgentWrapper
from bestiary.envs.env_batch import EnvBatch
from bestiary.reward_hacking.distances import DIVERGENCES, RunningMoments, observation_features, visitation_distances
from bestiary.types import Episode, Mode, State, TimeStep


class LogitsRecorder(AgentWrapper):
    """Adds the action logits to aux: those that the agent returns there, or the output of its policy head."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.recorded: dict[str, Tensor] = {}
        head = getattr(agent, "policy", None)
        if isinstance(head, nn.Module):
            head.register_forward_hook(self._record)

    def _record(self, head: nn.Module, inputs: Any, logits: Any) -> None:
        self.recorded["logits"] = logits

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        action, aux, state = self.agent.act(step, state, explore, rng)
        return action, self.recorded | aux, state


class PolicyPair(Agent):
    """A tested policy that acts, and a reference policy that only computes its logits at the same time steps.

    Each has its own recurrent state. If a policy samples more than its actions, such as commands, both sample the same:
    the reference policy's generator has the same seed.
    """

    def __init__(self, tested: LogitsRecorder, reference: LogitsRecorder, reference_rng: torch.Generator) -> None:
        super().__init__()
        self.tested, self.reference, self.reference_rng = tested, reference, reference_rng
        self.tested_leaves = len(tested.initial_state(1))

    def initial_state(self, batch_size: int) -> State:
        return (*self.tested.initial_state(batch_size), *self.reference.initial_state(batch_size))

    def act(
        self, step: TimeStep, state: State, explore: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor], State]:
        n = self.tested_leaves
        action, aux, tested_state = self.tested.act(step, state[:n], explore, rng)
        _, reference_aux, reference_state = self.reference.act(step, state[n:], explore, self.reference_rng)
        aux = {**aux, "reference_logits": reference_aux["logits"]}
        return action, aux, (*tested_state, *reference_state)


class Rollouts(NamedTuple):
    """Whole episodes, and the N steps of which they consist."""

    episodes: list[Episode]
    episode_index: NDArray[np.int64]  # [N] number of the episode to which a step belongs
    divergence: dict[str, NDArray[np.float64]]  # name -> [N]; empty without a reference policy
    visited: RunningMoments  # of the states in which an action was chosen


@torch.no_grad()
def collect(agent: Agent, env_batch: EnvBatch, episodes: int, mode: Mode, rng: torch.Generator) -> Rollouts:
    """Run whole episodes, with a quota per slot as in an evaluation. No action is chosen at an episode's last step."""
    slot = torch.arange(env_batch.num_envs)
    quota = torch.tensor(quotas(episodes, env_batch.num_envs))
    actor = Actor(env_batch, agent, explore_rates(mode, env_batch.num_envs), UNROLL, 0, rng.device)
    actor.rng = rng
    started, ended = torch.zeros_like(quota), torch.zeros_like(quota)
    finished: list[Episode] = []
    index, visited, divergence = [], RunningMoments(), {name: [] for name in DIVERGENCES}
    while (ended < quota).any():
        t, over = actor.unroll()
        for e in over:
            ended[e.slot] += 1
            if ended[e.slot] <= quota[e.slot]:
                finished.append(e)
        first = t.step.is_first.cpu()
        number = started + first[:-1].cumsum(0)  # [T, B] number of the slot's episode, from 1
        started = number[-1]
        acted = (number <= quota) & ~first[1:]
        visited.add(observation_features(t.step.obs[:-1][acted]))
        index.append((slot * (episodes + 1) + number)[acted])
        if "reference_logits" in t.aux:
            p, q = (t.aux[name][:-1].cpu()[acted] for name in ("logits", "reference_logits"))
            for name, measure in DIVERGENCES.items():
                divergence[name].append(measure(p, q))
    return Rollouts(
        sorted(finished, key=lambda e: e.slot),
        np.unique(torch.cat(index).numpy(), return_inverse=True)[1],
        {name: torch.cat(values).numpy() for name, values in divergence.items() if values},
        visited,
    )


def anomaly_scores(tested: Rollouts, reference: Rollouts) -> dict[str, float]:
    """The score of every detector: higher is more anomalous."""
    out: dict[str, float] = {}
    for name, by_step in tested.divergence.items():
        by_episode = np.bincount(tested.episode_index, by_step) / np.bincount(tested.episode_index)
        for per, x in (("episode", by_episode), ("step", by_step)):
            low, high = float(x.min()), float(x.max())
            spread = 0.0 if low == high else high - low  # also if all are infinite
            out |= {f"{name}_{per}_mean": float(x.mean()), f"{name}_{per}_max": high, f"{name}_{per}_range": spread}
    return out | visitation_distances(tested.visited, reference.visited)
