"""Frame stacking inside the agent: environments emit single frames, and the last few frames are recurrent state."""

import torch
from torch import Tensor, nn

from bestiary.types import Spec, State


def gather_steps(x: Tensor, steps: Tensor) -> Tensor:
    """Select time steps [K, B] of x [T, B, ...]: the result is [K, B, ...]."""
    return x[steps, torch.arange(steps.shape[1], device=x.device)]


class FrameStack(nn.Module):
    """Stacks the last `size` frames along the channels: [T, B, C, H, W] -> [T, B, size*C, H, W], oldest first.

    Before an episode has that many frames, its first frame is repeated. State: the last size - 1 frames.
    """

    def __init__(self, spec: Spec, size: int) -> None:
        super().__init__()
        self.size = size
        self.spec = spec

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        if self.size == 1:
            return ()
        shape = (batch_size, self.size - 1, *self.spec.obs_shape)
        return (torch.zeros(shape, dtype=self.spec.obs_dtype, device=device),)

    def forward(self, obs: Tensor, is_first: Tensor, state: State, steps: Tensor | None = None) -> tuple[Tensor, State]:
        """Stack all time steps, or only `steps` [K, B]. The returned state is that after the last stacked step."""
        if self.size == 1:
            return (obs if steps is None else gather_steps(obs, steps)), ()
        past = self.size - 1
        T, B = is_first.shape
        frames = torch.cat([state[0].transpose(0, 1), obs])  # [past + T, B, C, H, W]
        now = torch.arange(past, past + T, device=obs.device)[:, None].expand(T, B)
        episode_start = torch.where(is_first, now, 0).cummax(0).values  # [T, B]
        if steps is not None:
            now, episode_start = steps + past, episode_start.gather(0, steps)
        offset = torch.arange(-past, 1, device=obs.device)
        source = torch.maximum(now[..., None] + offset, episode_start[..., None])  # [T, B, size]
        column = torch.arange(B, device=obs.device)[None, :, None]
        stacked = frames[source, column]  # [T, B, size, C, H, W]
        return stacked.flatten(2, 3), (stacked[-1, :, 1:].contiguous(),)
