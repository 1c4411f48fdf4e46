"""From observations to features: encoders, the frame stack, and the torso that joins them to a memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.config.schema import Counts, kebab
from bestiary.cores.base import CoreConfig
from bestiary.errors import UserError
from bestiary.types import Spec, State, TimeStep

if TYPE_CHECKING:
    from bestiary.ops.program import Program


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


@dataclass(frozen=True)
class Shallow:
    """Three convolutions, as in Nature DQN and MonoBeast."""

    hidden_size: int = 512
    num_layers: int = 1
    """0: straight from the convolutions into memory"""
    filters: Counts = (32, 64, 64)
    """of each convolution: half as many cost a third"""

    def convolutions(self, channels: int) -> nn.Sequential:
        first, second, third = self.filters
        return nn.Sequential(
            nn.Conv2d(channels, first, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(first, second, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(second, third, 3),
            nn.ReLU(),
        )


@dataclass(frozen=True)
class Resnet:
    """The deep residual network of IMPALA: three stages of 16, 32 and 32 channels."""

    hidden_size: int = 256
    num_layers: int = 1

    def convolutions(self, channels: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (16, 32, 32):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(width), ResidualBlock(width)]
            channels = width
        return nn.Sequential(*layers, nn.ReLU())


@dataclass(frozen=True)
class SmallCnn:
    """Two 2x2 convolutions for pictures of a few pixels; no ReLU after the last layer."""

    hidden_size: int = 100
    num_layers: int = 1
    ends_linear: ClassVar[bool] = True

    def convolutions(self, channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 8, 2), nn.ReLU(), nn.Conv2d(8, 16, 2), nn.ReLU())


@dataclass(frozen=True)
class Mlp:
    """Fully connected layers on the flattened observation."""

    hidden_size: int = 64
    num_layers: int = 1
    """0: the observation as it is"""

    def convolutions(self, channels: int) -> nn.Sequential:
        return nn.Sequential()


@dataclass(frozen=True)
class Auto:
    """Mlp for vectors, SmallCnn for pictures below 36 pixels, Shallow for larger ones."""


EncoderConfig = Auto | Shallow | Resnet | SmallCnn | Mlp


@dataclass(frozen=True)
class Net:
    """What the agent perceives before it remembers."""

    encoder: EncoderConfig = field(default_factory=Auto)
    frame_stack: int = 1
    """pictures shown at once; the earlier ones are kept as memory, so environments emit single frames"""
    prev_action: bool = True
    """feed the previous action (one-hot)"""
    prev_reward: bool = True
    """feed the previous reward, clamped to [-1, 1]"""
    action_units: int | None = None
    """units of a layer with ReLU for the previous action; None: one-hot as it is"""
    reward_units: int | None = None
    """the same for the previous reward; None: the number as it is"""
    init: Literal["torch", "orthogonal"] = "torch"
    """first weights of encoder and heads: PyTorch's, or orthogonal, which learns sooner from pictures"""

    def __post_init__(self) -> None:
        if self.frame_stack < 1:
            raise UserError(f"net.frame-stack={self.frame_stack} must be at least 1")
        for name in ("action_units", "reward_units"):
            units = getattr(self, name)
            if units is not None and units < 1:
                raise UserError(f"net.{name.replace('_', '-')}={units} must be at least 1, or None for no layer")
        size, depth = getattr(self.encoder, "hidden_size", 1), getattr(self.encoder, "num_layers", 1)
        if size < 1 or depth < 0:
            raise UserError(f"net.encoder needs hidden-size >= 1 and num-layers >= 0, not {size} and {depth}")
        filters = getattr(self.encoder, "filters", (1, 1, 1))
        if len(filters) != 3 or min(filters) < 1:
            raise UserError(f"net.encoder.filters={filters} must be three numbers, such as 32,64,64")


MIN_PIXELS = {Shallow: 36, Resnet: 1, SmallCnn: 3, Mlp: 1}


def choose_encoder(encoder: EncoderConfig, spec: Spec) -> Shallow | Resnet | SmallCnn | Mlp:
    pixels = min(spec.obs_shape[1:]) if spec.is_image else 0
    if isinstance(encoder, Auto):
        fitting = [cls for cls in (Shallow, SmallCnn) if pixels >= MIN_PIXELS[cls]]
        return fitting[0]() if fitting else Mlp()
    name = kebab(type(encoder))
    if not spec.is_image and not isinstance(encoder, Mlp):
        raise UserError(f"encoder {name} needs pictures, but {spec.name} shows a vector: use net.encoder:mlp")
    if spec.is_image and pixels < MIN_PIXELS[type(encoder)]:
        least = MIN_PIXELS[type(encoder)]
        raise UserError(f"encoder {name} needs at least {least} pixels a side, {spec.name} has {pixels}: use mlp")
    return encoder


class Encoder(nn.Module):
    """[N, ...] -> [N, width]: convolutions if any, then fully connected layers, ReLU after each."""

    like: Tensor

    def __init__(self, cfg: EncoderConfig, spec: Spec, frame_stack: int) -> None:
        super().__init__()
        chosen = choose_encoder(cfg, spec)
        shape = (spec.obs_shape[0] * frame_stack, *spec.obs_shape[1:])
        self.scale = 1 / 255 if spec.obs_dtype == torch.uint8 else 1.0
        # channels_last makes CPU convolutions about twice as fast; the mathematics is the same
        self.layout = torch.channels_last if spec.is_image else torch.contiguous_format
        self.convolutions = chosen.convolutions(shape[0]).to(memory_format=self.layout)  # type: ignore
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, *shape)).numel()
        widths = [flat, *[chosen.hidden_size] * chosen.num_layers]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.width = widths[-1]
        self.shape = shape
        self.ends_linear = getattr(chosen, "ends_linear", False)
        self.register_buffer("like", torch.empty(0), persistent=False)  # where and how exactly it computes

    def forward(self, obs: Tensor) -> Tensor:
        x = obs.to(self.like.dtype, memory_format=self.layout)
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        x = self.convolutions(x).flatten(1)
        for number, layer in enumerate(self.layers):
            x = layer(x) if self.ends_linear and number == len(self.layers) - 1 else F.relu(layer(x))
        return x

    def compile_to(self, program: "Program") -> int | None:
        """As instructions for compiled acting; None for networks that are not small."""
        x, (channels, *size) = program.obs, self.shape if len(self.shape) == 3 else (1, 1, 1)
        convolutions = [m for m in self.convolutions if not isinstance(m, nn.ReLU)]
        if not all(isinstance(m, nn.Conv2d) and m.stride == (1, 1) and m.padding == (0, 0) for m in convolutions):
            return None
        for number, convolution in enumerate(convolutions):
            assert isinstance(convolution, nn.Conv2d)
            x = program.convolution(convolution, x, size[0], size[1], channels_last=number > 0)
            channels, size = convolution.out_channels, [n - convolution.kernel_size[0] + 1 for n in size]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            relu = not (self.ends_linear and number == len(self.layers) - 1)
            x = program.linear(layer, x, relu, channels if convolutions and number == 0 else None)
        return x


@torch.no_grad()
def orthogonal(module: nn.Module, gain: float) -> None:
    """Orthogonal weights and zero biases for every convolution and linear layer inside."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # made contiguous first: the initialiser does not know channels_last
            layer.weight.copy_(nn.init.orthogonal_(torch.empty(layer.weight.shape), gain))
            if layer.bias is not None:
                layer.bias.zero_()


def definer(cls: type, method: str) -> type:
    """The class that `cls` has a method from."""
    return next(base for base in cls.__mro__ if method in vars(base))


def embedding(width: int, units: int | None) -> tuple[nn.Module, int]:
    """A layer of so many units with ReLU, or nothing; and how wide what comes out is."""
    if units is None:
        return nn.Identity(), width
    return nn.Sequential(nn.Linear(width, units), nn.ReLU()), units


def head(width: int, hidden: Sequence[int], outputs: int, last: float, init: str) -> nn.Sequential:
    """Fully connected layers with ReLU between them. The last one starts within +-`last`: nearly no preference.

    Without orthogonal weights the others start as the memory-RL reference does: within one over the root of their
    outputs, biases 0.1.
    """
    widths = [width, *hidden, outputs]
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    for layer in layers[:-1]:
        if init == "orthogonal":
            orthogonal(layer, gain=2**0.5)
        else:
            bound = layer.out_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.constant_(layer.bias, 0.1)
    nn.init.uniform_(layers[-1].weight, -last, last)
    nn.init.uniform_(layers[-1].bias, -last, last)
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.ReLU())][:-1])


class Dueling(nn.Module):
    """What being here is worth, and what each action adds to that: V + A - mean of A (Wang et al. 2016).

    The mean is over actions that do something in this game.
    """

    mix: Tensor

    def __init__(self, width: int, hidden: Sequence[int], legal: Tensor, init: str) -> None:
        super().__init__()
        self.value = head(width, hidden, 1, last=3e-3, init=init)
        self.advantage = head(width, hidden, len(legal), last=3e-3, init=init)
        share = legal / legal.sum()
        mix = torch.cat([torch.ones(len(legal), 1), torch.eye(len(legal)) - share], 1)  # of [V, A]
        self.register_buffer("mix", mix, persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(torch.cat([self.value(h), self.advantage(h)], -1), self.mix)

    def compile_to(self, program: "Program", x: int) -> int:
        parts = ((program.layers(self.value, x), 1), (program.layers(self.advantage, x), len(self.mix)))
        both = program.alloc(1 + len(self.mix))
        program.copy(parts[0][0], 1, both)
        program.copy(*parts[1], both + 1)
        return program.matrix(lambda: self.mix, both)


def at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[T, B, ...] at [K, B] -> [K, B, ...]."""
    return x[rows, torch.arange(rows.shape[1], device=x.device)]


class FrameStack(nn.Module):
    """The last few frames are memory: [T, B, C, H, W] -> [T, B, size*C, H, W], oldest first.

    An episode's first frame stands in for those before it.
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

    def forward(self, obs: Tensor, is_first: Tensor, state: State, rows: Tensor | None = None) -> tuple[Tensor, State]:
        """rows: [K, B], the only ones to be stacked; None: all. Memory is that after the last of them."""
        if self.size == 1:
            return (obs if rows is None else at_rows(obs, rows)), ()
        past = self.size - 1
        T, B = is_first.shape
        frames = torch.cat([state[0].transpose(0, 1), obs])  # [past + T, B, C, H, W]
        now = torch.arange(past, past + T, device=obs.device)[:, None].expand(T, B)
        opened = torch.where(is_first, now, 0).cummax(0).values  # [T, B] where the episode began
        if rows is not None:
            now, opened = rows + past, opened.gather(0, rows)
        back = torch.arange(-past, 1, device=obs.device)
        source = torch.maximum(now[..., None] + back, opened[..., None])  # [T, B, size]
        column = torch.arange(B, device=obs.device)[None, :, None]
        stacked = frames[source, column]  # [T, B, size, C, H, W]
        return stacked.flatten(2, 3), (stacked[-1, :, 1:].contiguous(),)


class Torso(nn.Module):
    """Perceive, then remember: TimeStep [T, B, ...] -> features [T, B, width]."""

    def __init__(self, spec: Spec, net: Net, core: CoreConfig) -> None:
        super().__init__()
        if net.frame_stack > 1 and not spec.is_image:
            raise UserError(f"net.frame-stack={net.frame_stack} needs pictures, but {spec.name} shows a vector: use 1")
        self.net = net
        self.num_actions = spec.num_actions
        self.stack = FrameStack(spec, net.frame_stack)
        self.encoder = Encoder(net.encoder, spec, net.frame_stack)
        # what else is fed, each with its layer or as it is
        self.reward, reward_width = embedding(1, net.reward_units if net.prev_reward else None)
        self.action, action_width = embedding(spec.num_actions, net.action_units if net.prev_action else None)
        if net.init == "orthogonal":
            for module in (self.encoder, self.reward, self.action):
                orthogonal(module, gain=2**0.5)  # keeps the scale through ReLU
        self.core = core.build(self.encoder.width + net.prev_reward * reward_width + net.prev_action * action_width)
        self.width = self.core.width

    def initial_state(self, batch_size: int) -> State:
        device = self.encoder.like.device
        return self.stack.initial_state(batch_size, device) + self.core.initial_state(batch_size)

    def compile_to(self, program: "Program") -> int | None:
        """As instructions for compiled acting, in the order of `forward`; None: too large, or memory has none."""
        # a subclass that changes what a memory does must not act by its parent's instructions
        forward, written = (definer(type(self.core), name) for name in ("forward", "compile_to"))
        if forward is not written:
            return None
        seen = self.encoder.compile_to(program) if self.net.frame_stack == 1 else None
        if seen is None:
            return None
        parts = [(seen, self.encoder.width)]
        fed = (
            (self.net.prev_reward, self.reward, program.reward, 1),
            (self.net.prev_action, self.action, program.action, 0),
        )
        for wanted, layers, x, n in fed:
            if wanted and isinstance(layers, nn.Sequential):
                layer: nn.Linear = layers[0]  # type: ignore
                parts.append((program.linear(layer, x, relu=True), layer.out_features))
            elif wanted:
                parts.append((x, n or self.num_actions))
        x = program.alloc(sum(n for _, n in parts))
        at = x
        for part, n in parts:
            program.copy(part, n, at)
            at += n
        return self.core.compile_to(program, x)

    @property
    def memoryless(self) -> bool:
        """Nothing but frames is carried from row to row."""
        return not self.core.initial_state(1)

    def remember(self, step: TimeStep, state: State) -> State:
        """Memory after these rows; what nothing depends on is not computed."""
        if not self.memoryless:
            # a copy where there is one row: a core may write into its state, and others begin with the same
            return self(step, tuple(s.clone() for s in state) if len(step.is_first) == 1 else state)[1]
        last = torch.full_like(step.prev_action[:1], len(step.is_first) - 1)
        return self.stack(step.obs, step.is_first, state, last)[1]

    def at(self, step: TimeStep, state: State, rows: Tensor) -> Tensor:
        """Without memory: features of rows [K, B] alone. The others are not even looked at."""
        assert self.memoryless
        obs, _ = self.stack(step.obs, step.is_first, state, rows)
        chosen = TimeStep(obs, *(at_rows(x, rows) for x in step[1:]))
        return self._through(chosen, ())[0]

    def forward(self, step: TimeStep, state: State) -> tuple[Tensor, State]:
        split = 0 if self.net.frame_stack == 1 else 1
        self.core.check(state[split:])
        obs, frames = self.stack(step.obs, step.is_first, state[:split])
        x, memory = self._through(step._replace(obs=obs), state[split:])
        return x, frames + memory

    def _through(self, step: TimeStep, state: State) -> tuple[Tensor, State]:
        """Encoder and memory; observations are stacked."""
        T, B = step.is_first.shape
        x = self.encoder(step.obs.flatten(0, 1)).view(T, B, -1)
        inputs = [x]
        if self.net.prev_reward:
            inputs.append(self.reward(step.reward.clamp(-1, 1)[..., None].to(x.dtype)))
        if self.net.prev_action:
            # nothing led to the first row of an episode, so no action is shown there
            shown = F.one_hot(step.prev_action, self.num_actions) * ~step.is_first[..., None]
            inputs.append(self.action(shown.to(x.dtype)))
        return self.core(torch.cat(inputs, -1), step.is_first, state)
