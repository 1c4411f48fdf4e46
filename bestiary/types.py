"""The vocabulary: what the world says, what an actor records, what a learner returns."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]  # memory: every leaf is [B, ...]; () remembers nothing
Metrics = dict[str, Tensor]
Mode = Literal["greedy", "sampled"]  # the best action, or one drawn from the policy


class Spec(NamedTuple):
    """What an agent must know of an environment to be built."""

    name: str
    obs_shape: tuple[int, ...]
    obs_dtype: torch.dtype
    num_actions: int
    frames_per_step: int = 1
    horizon: int | None = None  # moves of the longest episode, where that is known
    legal: tuple[bool, ...] | None = None  # actions that do something here; None: all

    @property
    def is_image(self) -> bool:
        return len(self.obs_shape) == 3


class TimeStep(NamedTuple):
    """What the world says; every field is [B, ...], or [T, B, ...] once stacked."""

    obs: Tensor
    prev_action: Tensor  # what led here; 0 where is_first
    reward: Tensor  # what that earned; 0 where is_first
    is_first: Tensor  # an episode starts here: forget
    is_terminal: Tensor  # nothing of value lies beyond: bootstrap 0


class Trajectory(NamedTuple):
    """The only thing that travels from actor to learner.

    T+1 rows tell of T moves. The last row is the first row of the stream's next trajectory.
    """

    step: TimeStep  # [T+1, B, ...]
    action: Tensor  # [T+1, B]
    aux: dict[str, Tensor]  # [T+1, B, ...] whatever act() chose to keep
    state: State  # [B, ...] memory just before row 0
    version: Tensor  # [B] which weights acted


class Transitions(NamedTuple):
    """Rows seen as transitions: entry t leads from row t to row t+1."""

    reward: Tensor  # [T, B]
    discount: Tensor  # [T, B] 0 where nothing lies beyond
    valid: Tensor  # [T, B] false where row t+1 opens another episode


def transitions(step: TimeStep, gamma: float) -> Transitions:
    """Turn rows into transitions. The only place that shifts time."""
    valid = ~step.is_first[1:]
    alive = valid & ~step.is_terminal[1:]
    return Transitions(step.reward[1:], gamma * alive.to(step.reward.dtype), valid)


class Batch(NamedTuple):
    trajectory: Trajectory
    keys: Tensor | None = None  # whose priorities an update may change
    weight: Tensor | None = None  # [B] how much each counts; None: all the same
    reached: State = ()  # memory the actor had after the burn-in, where that is known
    about: Metrics = {}  # what the replay says of all it holds

    @property
    def is_critic_refresh(self) -> bool:
        """True for whole episodes for which a critic computes value targets; they make no gradient step."""
        return "critic_refresh" in self.about


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
    """One whole game, and the lives it was made of. Returns are raw scores in float64."""

    slot: int
    score: float
    steps: int  # agent steps
    frames: int  # environment frames: steps x frame skip
    lives: tuple[float, ...]  # return of each life; a single entry where there are no lives
    truncated: bool
    success: bool | None = None  # where the environment says what success is
    info: dict[str, float] = {}  # what the agent says of the episode, such as the desired return and horizon
    components: dict[str, float] = {}  # what could have been paid for, whatever was; no learner ever sees it
    life_components: tuple[dict[str, float], ...] = ()  # the same of each life


class Progress(NamedTuple):
    """What a runtime tells after each unroll; everything a log, a display or a stop rule needs."""

    frames: int
    steps: int
    updates: int
    episodes: list[Episode]
    metrics: dict[str, float]  # means over the updates since the last Progress; empty if none
    notes: tuple[str, ...] = ()  # what a person should know: who was lost, and what was done about it


Snapshot = dict[str, Any]  # nested dicts and lists of tensors, numbers and strings: safe to load
