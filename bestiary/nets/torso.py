"""The torso: encoder, frame stack, previous action and reward, and the recurrent core in one module."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.nets.encoders import Encoder, Net
from bestiary.nets.frame_stack import FrameStack, gather_steps
from bestiary.nets.heads import orthogonal
from bestiary.types import Spec, State, TimeStep

if TYPE_CHECKING:
    from bestiary.ops.program import Program


def defining_class(cls: type, method: str) -> type:
    """The class in the inheritance of `cls` that defines a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


def embedding(width: int, units: int | None) -> tuple[nn.Module, int]:
    """A linear layer with ReLU, or the identity if units is None; also returns the output width."""
    if units is None:
        return nn.Identity(), width
    return nn.Sequential(nn.Linear(width, units), nn.ReLU()), units


class Torso(nn.Module):
    """Encoder, then core: TimeStep [T, B, ...] -> features [T, B, width]. State: stacked frames, then the core's."""

    def __init__(self, spec: Spec, net: Net, core: CoreConfig) -> None:
        super().__init__()
        if net.frame_stack > 1 and not spec.is_image:
            raise UserError(
                f"net.frame-stack={net.frame_stack} needs images, but {spec.name} has vector observations: use 1"
            )
        self.net = net
        self.num_actions = spec.num_actions
        self.stack = FrameStack(spec, net.frame_stack)
        self.encoder = Encoder(net.encoder, spec, net.frame_stack)
        self.reward, reward_width = embedding(1, net.reward_units if net.prev_reward else None)
        self.action, action_width = embedding(spec.num_actions, net.action_units if net.prev_action else None)
        if net.init == "orthogonal":
            for module in (self.encoder, self.reward, self.action):
                orthogonal(module, gain=2**0.5)  # the gain that preserves the variance through ReLU
        self.core = core.build(self.encoder.width + net.prev_reward * reward_width + net.prev_action * action_width)
        self.width = self.core.width

    def initial_state(self, batch_size: int) -> State:
        device = self.encoder.like.device
        return self.stack.initial_state(batch_size, device) + self.core.initial_state(batch_size)

    def compile_to(self, program: "Program") -> int | None:
        """Append the instructions of `forward` for compiled acting; None if the encoder or the core has none."""
        # a subclass that overrides `forward` alone must not act by its parent's instructions
        forward, compiled = (defining_class(type(self.core), name) for name in ("forward", "compile_to"))
        if forward is not compiled:
            return None
        features = self.encoder.compile_to(program) if self.net.frame_stack == 1 else None
        if features is None:
            return None
        parts = [(features, self.encoder.width)]
        inputs = (
            (self.net.prev_reward, self.reward, program.reward, 1),
            (self.net.prev_action, self.action, program.action, self.num_actions),
        )
        for enabled, layers, x, width in inputs:
            if enabled and isinstance(layers, nn.Sequential):
                layer: nn.Linear = layers[0]  # type: ignore
                parts.append((program.linear(layer, x, relu=True), layer.out_features))
            elif enabled:
                parts.append((x, width))
        x = program.alloc(sum(n for _, n in parts))
        at = x
        for part, n in parts:
            program.copy(part, n, at)
            at += n
        return self.core.compile_to(program, x)

    @property
    def memoryless(self) -> bool:
        """True if the core has no state: features depend on the current (stacked) observation alone."""
        return not self.core.initial_state(1)

    def final_state(self, step: TimeStep, state: State) -> State:
        """The recurrent state after these time steps; without a core state only the frame stack is computed."""
        if not self.memoryless:
            # a core may update its state in place for a single step, and the caller may reuse the state: copy it
            return self(step, tuple(s.clone() for s in state) if len(step.is_first) == 1 else state)[1]
        last = torch.full_like(step.prev_action[:1], len(step.is_first) - 1)
        return self.stack(step.obs, step.is_first, state, last)[1]

    def features_at(self, step: TimeStep, state: State, steps: Tensor) -> Tensor:
        """Features of the time steps [K, B] alone; only for memoryless torsos, which need not encode the others."""
        assert self.memoryless
        obs, _ = self.stack(step.obs, step.is_first, state, steps)
        selected = TimeStep(obs, *(gather_steps(x, steps) for x in step[1:]))
        return self._encode(selected, ())[0]

    def forward(self, step: TimeStep, state: State) -> tuple[Tensor, State]:
        split = 0 if self.net.frame_stack == 1 else 1
        self.core.check(state[split:])
        obs, frames = self.stack(step.obs, step.is_first, state[:split])
        x, memory = self._encode(step._replace(obs=obs), state[split:])
        return x, frames + memory

    def _encode(self, step: TimeStep, state: State) -> tuple[Tensor, State]:
        """Encoder and core on observations that are stacked already."""
        T, B = step.is_first.shape
        x = self.encoder(step.obs.flatten(0, 1)).view(T, B, -1)
        inputs = [x]
        if self.net.prev_reward:
            inputs.append(self.reward(step.reward.clamp(-1, 1)[..., None].to(x.dtype)))
        if self.net.prev_action:
            # an episode's first step has no previous action: its one-hot vector is all zeros
            one_hot = F.one_hot(step.prev_action, self.num_actions) * ~step.is_first[..., None]
            inputs.append(self.action(one_hot.to(x.dtype)))
        return self.core(torch.cat(inputs, -1), step.is_first, state)
