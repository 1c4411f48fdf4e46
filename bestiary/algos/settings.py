"""Checks of settings that several algorithms have, and values that follow from the longest episode."""

from typing import Any

from bestiary.errors import UserError
from bestiary.types import Spec


def check_fractions(cfg: Any, *names: str) -> None:
    """Refuse values outside of [0, 1]; None is allowed."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"algo.{name.replace('_', '-')}={value} must lie in [0, 1]")


def check_positive(cfg: Any, *names: str) -> None:
    """Refuse values that are not positive; None is allowed."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and value <= 0:
            raise UserError(f"algo.{name.replace('_', '-')}={value} must be positive, or None")


def check_target_network(tau: float | None, target_update_period: int | None) -> None:
    if (tau is None) == (target_update_period is None):
        raise UserError(
            "set one of algo.tau (Polyak averaging) and algo.target-update-period (copies), and the other to None"
        )


def check_layers(head: tuple[int, ...]) -> None:
    if any(units < 1 for units in head):
        raise UserError(f"algo.head={head} must be layers of at least one unit")


def check_burn_in(burn_in: int, sequence_length: int | None) -> None:
    if burn_in < 0 or (burn_in and burn_in >= (sequence_length or 0)):
        raise UserError(
            f"algo.burn-in={burn_in} must be at least 0 and below algo.replay.sequence-length={sequence_length}"
        )


def per_horizon(spec: Spec, flag: str) -> float:
    """1 / (maximum episode length), the default of some settings."""
    if spec.horizon is None:
        raise UserError(f"{spec.name} does not say how long its episodes can be: set --algo.{flag} to a number")
    return 1 / spec.horizon


def discount_factor(discount: float | None, spec: Spec) -> float:
    """gamma; None: 1 - 1 / (maximum episode length)."""
    return 1 - per_horizon(spec, "discount") if discount is None else discount
