"""Burn-in: steps that refresh a stored or initial recurrent state without gradient (Kapturowski et al. 2019)."""

import torch

from bestiary.nets import Torso
from bestiary.types import State, TimeStep, Trajectory


def split_burn_in(t: Trajectory, burn_in: int) -> tuple[TimeStep, Trajectory]:
    """The steps of the burn-in, and the steps to learn from."""
    past, rest = (TimeStep(*(x[part] for x in t.step)) for part in (slice(burn_in), slice(burn_in, None)))
    return past, t._replace(step=rest, action=t.action[burn_in:], aux={k: x[burn_in:] for k, x in t.aux.items()})


@torch.no_grad()
def burn_in_state(torso: Torso, past: TimeStep, state: State) -> State:
    """Recurrent state after the burn-in; () begins with the initial state."""
    state = state or torso.initial_state(past.is_first.shape[1])
    return torso.final_state(past, state) if len(past.is_first) else state
