"""Reward components: train on a weighted sum of named components of the reward, and log all components.

This is the setting of reward misspecification (Pan et al. 2022): an agent is trained on a reward proxy while the true
reward is measured. A component is a function of one transition. A reward is a weighted sum of components.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError

SCORE = "score"  # the environment's own reward, which is the true reward by default
NUMBER = r"\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?"
TERM = re.compile(rf"\s*([+-]?)\s*(?:({NUMBER})\s*\*\s*)?([A-Za-z_]\w*)\s*")

Weights = dict[str, float]
NamedRewards = Mapping[str, Callable[[float], Weights]]  # rewards with a name and one number, such as fuel:10


class Transition(NamedTuple):
    """The arguments of a component."""

    prev_info: dict[str, Any]  # info when the action was chosen
    action: Any
    obs: Any  # after the action
    reward: float  # the environment's own
    info: dict[str, Any]  # after the action


Components = Mapping[str, Callable[[Transition], float]]


def parse_reward(text: str, components: Mapping[str, Any], named_rewards: NamedRewards | None = None) -> Weights:
    """Parse `score`, a sum such as `10*survival-20*bullet`, or a named reward with its number such as `fuel:10`."""
    named_rewards = named_rewards or {}
    known = f"components are {', '.join(components)}" + "".join(f", {n}:NUMBER" for n in named_rewards)
    name, colon, number = text.strip().partition(":")
    if colon:
        if name not in named_rewards:
            suggestion = did_you_mean(name, named_rewards, known)
            raise UserError(f"there is no named reward {name!r} that takes a number: {suggestion}")
        return named_rewards[name](_number(number, text, f"{name}:10"))
    weights: Weights = {}
    position = 0
    while position < len(text):
        term = TERM.match(text, position)
        if term is None or (position > 0 and not term[1]):
            raise UserError(f"reward={text!r} is not a sum of components such as score-2*{[*components][-1]}: {known}")
        sign, weight, name = term.groups()
        if name not in components:
            raise UserError(f"there is no component {name!r}: {did_you_mean(name, components, known)}")
        weights[name] = weights.get(name, 0.0) + _number(weight or "1", text, "10*score") * (-1 if sign == "-" else 1)
        position = term.end()
    if not weights:
        raise UserError(f"reward={text!r} names no component: {known}")
    return weights


def _number(text: str, whole: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text!r} in {whole!r} is not a number: write it like {example}")
    return value


def format_number(number: float) -> str:
    """The shortest text that parses to the same number: 10, 0.5, 1e-07."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(float(number))


def format_reward(weights: Weights) -> str:
    """The inverse of `parse_reward`: {"score": 1, "fuel": 9} becomes score+9*fuel."""
    terms = [("" if abs(w) == 1 else f"{format_number(abs(w))}*") + name for name, w in weights.items()]
    signs = ["-" if w < 0 else "+" for w in weights.values()]
    return "".join(map("".join, zip(signs, terms, strict=True))).removeprefix("+")


def file_name(reward: str) -> str:
    """A reward as part of a file name. Signs are kept, because they distinguish rewards."""
    return re.sub(r"[^\w.+-]+", "-", reward.replace("*", "x")).strip("-")


def weighted_sum(weights: Weights, components: Mapping[str, float]) -> float:
    """The reward (or return) with these weights, given the values (or sums) of the components."""
    return sum(weight * components[name] for name, weight in weights.items())


class ComponentReward(gymnasium.Wrapper):
    """Replaces the reward by a weighted sum of named components; the environment's own reward is the component `score`.

    All components are returned in info["components"], in the order of `component_names`. Bestiary logs them per step,
    life and episode. They do not reach the agent or the learner.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        components: Components,
        reward: str = SCORE,
        named_rewards: NamedRewards | None = None,
    ) -> None:
        super().__init__(env)
        self.components: Components = {SCORE: lambda transition: transition.reward, **components}
        self.component_names = tuple(self.components)
        self.weights = parse_reward(reward, self.components, named_rewards)
        self.weight_vector = np.array([self.weights.get(name, 0.0) for name in self.components])
        self.rewarded = np.flatnonzero(self.weight_vector)  # other components may have any value, even NaN
        self.prev_info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, self.prev_info = self.env.reset(seed=seed, options=options)
        return obs, self.prev_info | {"components": np.zeros(len(self.components))}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        transition = Transition(self.prev_info, action, obs, float(reward), info)
        values = np.array([component(transition) for component in self.components.values()], np.float64)
        self.prev_info = info
        total = float(self.weight_vector[self.rewarded] @ values[self.rewarded])
        return obs, total, terminated, truncated, info | {"components": values}
