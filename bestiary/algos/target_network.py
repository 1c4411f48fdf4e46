"""Target networks: copies that follow the online network slowly (Mnih et al. 2015, Lillicrap et al. 2016)."""

import copy

import torch
from torch import Tensor, nn

from bestiary.config.compat import copy_all, lerp_all


class TargetNetwork:
    """Follows the online network by Polyak averaging after every update, or by a copy every `period` updates."""

    def __init__(self, online: nn.Module, tau: float | None, period: int | None) -> None:
        self.online = online
        self.tau, self.period = tau, period
        self.module = copy.deepcopy(online).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Call after every update of the online network; `updates` counts them."""
        target: list[Tensor] = list(self.module.parameters())
        online: list[Tensor] = list(self.online.parameters())
        if self.tau is not None:
            lerp_all(target, online, self.tau)
        elif self.period is not None and updates % self.period == 0:
            copy_all(target, online)
