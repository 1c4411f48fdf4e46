"""Rewards taken apart: named components, what each of them is worth to a run, and all of them on record.

A component is a function of a move. A reward is a weighted sum of components; what a run is paid by one of them, or by
none of the ones that matter, is the experiment. All are logged whatever is paid for.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from bestiary.config.suggestions import did_you_mean
from bestiary.errors import UserError

SCORE = "score"  # the environment's own reward: the true one, unless someone says otherwise
NUMBER = r"\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?"
TERM = re.compile(rf"\s*([+-]?)\s*(?:({NUMBER})\s*\*\s*)?([A-Za-z_]\w*)\s*")

Weights = dict[str, float]
Named = Mapping[str, Callable[[float], Weights]]  # rewards that go by a name and one number, such as fuel:10


class Move(NamedTuple):
    """What a component is worked out from."""

    before: dict[str, Any]  # info as it was when the action was chosen
    action: Any
    obs: Any  # after it
    reward: float  # the environment's own
    info: dict[str, Any]


Components = Mapping[str, Callable[[Move], float]]


def parse_reward(text: str, components: Mapping[str, Any], named: Named | None = None) -> Weights:
    """`score`, a sum like `10*survival-20*bullet`, or a named one with its number, like `fuel:10`."""
    named = named or {}
    known = f"components are {', '.join(components)}" + "".join(f", {n}:NUMBER" for n in named)
    name, colon, number = text.strip().partition(":")
    if colon:
        if name not in named:
            raise UserError(f"there is no reward {name!r} that takes a number: {did_you_mean(name, named, known)}")
        return named[name](_number(number, text, f"{name}:10"))
    found: Weights = {}
    at = 0
    while at < len(text):
        term = TERM.match(text, at)
        if term is None or (at > 0 and not term[1]):
            raise UserError(f"reward={text!r} is not a sum of components such as score-2*{[*components][-1]}: {known}")
        sign, weight, name = term.groups()
        if name not in components:
            raise UserError(f"there is no component {name!r}: {did_you_mean(name, components, known)}")
        found[name] = found.get(name, 0.0) + _number(weight or "1", text, "10*score") * (-1 if sign == "-" else 1)
        at = term.end()
    if not found:
        raise UserError(f"reward={text!r} names nothing to be paid for: {known}")
    return found


def _number(text: str, whole: str, example: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text!r} in {whole!r} is not a number: write it like {example}")
    return value


def plain(number: float) -> str:
    """As short as it can be and still the same number: 10, 0.5, 1e-07."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(float(number))


def spell(weights: Weights) -> str:
    """A sum as it can be parsed: {"score": 1, "fuel": 9} is score+9*fuel."""
    terms = [("" if abs(w) == 1 else f"{plain(abs(w))}*") + name for name, w in weights.items()]
    signs = ["-" if w < 0 else "+" for w in weights.values()]
    return "".join(map("".join, zip(signs, terms, strict=True))).removeprefix("+")


def file_name(reward: str) -> str:
    """A reward as part of a file's name: signs stay, since they tell rewards apart."""
    return re.sub(r"[^\w.+-]+", "-", reward.replace("*", "x")).strip("-")


def worth(weights: Weights, components: Mapping[str, float]) -> float:
    """What so much of every component is paid by a reward."""
    return sum(weight * components[name] for name, weight in weights.items())


class Proxy(gymnasium.Wrapper):
    """Pays a weighted sum of named components instead of the environment's own reward, which becomes `score`.

    All components are told in info["components"], in the order of `component_names`: bestiary logs them per step, life
    and game, and keeps them from whatever learns.
    """

    def __init__(self, env: gymnasium.Env, components: Components, reward: str = SCORE, named: Named | None = None):
        super().__init__(env)
        self.parts: Components = {SCORE: lambda move: move.reward, **components}
        self.component_names = tuple(self.parts)
        self.weights = parse_reward(reward, self.parts, named)
        self.prices = np.array([self.weights.get(name, 0.0) for name in self.parts])
        self.paid = np.flatnonzero(self.prices)  # what else there is may be anything, even not a number
        self.before: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, self.before = self.env.reset(seed=seed, options=options)
        return obs, self.before | {"components": np.zeros(len(self.parts))}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        move = Move(self.before, action, obs, float(reward), info)
        values = np.array([part(move) for part in self.parts.values()], np.float64)
        self.before = info
        paid = float(self.prices[self.paid] @ values[self.paid])
        return obs, paid, terminated, truncated, info | {"components": values}
