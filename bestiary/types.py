"""The package's data types: time steps, trajectories, transitions, batches, updates, episodes and progress."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]  # recurrent state: every leaf is [B, ...]; () for an agent without memory
Metrics = dict[str, Tensor]
Mode = Literal["greedy", "sampled"]  # the best action, or an action sampled from the policy


class Spec(NamedTuple):
    """The properties of an environment that an agent depends on."""

    name: str
    obs_shape: tuple[int, ...]
    obs_dtype: torch.dtype
    num_actions: int
    frames_per_step: int = 1  # frame skip
    horizon: int | None = None  # maximum episode length in steps; None: unknown
    legal: tuple[bool, ...] | None = None  # which actions have an effect; None: all

    @property
    def is_image(self) -> bool:
        return len(self.obs_shape) == 3


class TimeStep(NamedTuple):
    """One observation of an environment, with what led to it. Fields are [B, ...], or [T, B, ...] once stacked."""

    obs: Tensor
    prev_action: Tensor  # the action before this step; 0 where is_first
    reward: Tensor  # the reward of that action; 0 where is_first
    is_first: Tensor  # True at the first step of an episode: the recurrent state is reset
    is_terminal: Tensor  # True where the value of this step is 0: termination or a lost life, but not truncation


class Trajectory(NamedTuple):
    """T+1 consecutive steps of B environment streams: what actors send to replays and learners.

    T+1 steps make T transitions. The last step is the overlapping step: it is the first step of the stream's next
    trajectory as well, with the same action. Here its value bootstraps; there its action is learnt from.
    """

    step: TimeStep  # [T+1, B, ...]
    action: Tensor  # [T+1, B] the action chosen at each step
    aux: dict[str, Tensor]  # [T+1, B, ...] what `Agent.act` returned besides, such as the logits
    state: State  # [B, ...] recurrent state before step 0
    version: Tensor  # [B] version of the weights that chose the actions


class Transitions(NamedTuple):
    """Transitions between consecutive steps: entry t leads from step t to step t+1."""

    reward: Tensor  # [T, B]
    discount: Tensor  # [T, B] gamma, or 0 where step t+1 is terminal
    valid: Tensor  # [T, B] False where step t+1 is the first of another episode


def within_episode(is_first: Tensor) -> Tensor:
    """[T+1, ...] -> [T, ...]: transition t stays in its episode, because step t+1 does not start another."""
    return ~is_first[1:]


def transitions(step: TimeStep, gamma: float) -> Transitions:
    """T+1 time steps as T transitions: with `within_episode` the only place that shifts rewards and flags in time."""
    valid = within_episode(step.is_first)
    alive = valid & ~step.is_terminal[1:]
    return Transitions(step.reward[1:], gamma * alive.to(step.reward.dtype), valid)


class Batch(NamedTuple):
    """What a replay samples for one update."""

    trajectory: Trajectory
    keys: Tensor | None = None  # identify the sampled items, whose priorities an update may change
    weight: Tensor | None = None  # [B] importance sampling weights; None: all 1
    actor_state: State = ()  # recurrent state that the actor had after the burn-in, where it was stored
    info: Metrics = {}  # statistics of the whole replay, for the learner

    @property
    def is_critic_refresh(self) -> bool:
        """True for whole episodes for which a critic computes value targets; they make no gradient step."""
        return "critic_refresh" in self.info


class ValueTargets(NamedTuple):
    """A critic's targets and advantages for the transitions of whole episodes."""

    target: Tensor  # [T, B]
    advantage: Tensor  # [T, B] target - V(s)


class Update(NamedTuple):
    """What one call of `Learner.update` returns."""

    metrics: Metrics  # empty where no gradient step was made
    priorities: Tensor | None = None  # [B] new priorities of the sampled items
    value_targets: ValueTargets | None = None  # to be stored with the sampled episodes


class Episode(NamedTuple):
    """A finished episode. Returns are sums of unclipped rewards in float64."""

    slot: int  # index of the environment in its batch
    score: float  # undiscounted return
    steps: int  # agent steps
    frames: int  # environment frames: steps x frame skip
    life_returns: tuple[float, ...]  # return of each life; one entry where the environment has no lives
    truncated: bool  # True where a time limit ended the episode
    success: bool | None = None  # None: the environment does not define success
    info: dict[str, float] = {}  # numbers from the agent, such as the desired return and horizon
    components: dict[str, float] = {}  # sums of the reward components, whether or not they are rewarded
    life_components: tuple[dict[str, float], ...] = ()  # the same for each life


class Progress(NamedTuple):
    """What a runtime yields after each unroll: counters, finished episodes and metrics, for logs and displays."""

    frames: int
    steps: int
    updates: int
    episodes: list[Episode]
    metrics: dict[str, float]  # means over the updates since the last Progress; empty if there were none
    notes: tuple[str, ...] = ()  # warnings for the user, such as a worker that was lost and replaced


Snapshot = dict[str, Any]  # nested dicts and lists of tensors, numbers and strings, which load without running code
