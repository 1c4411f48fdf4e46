"""Encoders: from an observation (image or vector) to a feature vector."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bestiary.config.schema import Counts, kebab
from bestiary.errors import UserError
from bestiary.types import Spec

if TYPE_CHECKING:
    from bestiary.ops.program import Program


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with ReLU before each, and a skip connection (Espeholt et al. 2018, fig. 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


@dataclass(frozen=True)
class Shallow:
    """Nature-DQN encoder: three convolutions (Mnih et al. 2015; also MonoBeast)."""

    hidden_size: int = 512
    """units of each fully connected layer after the convolutions (Nature DQN: 512)"""
    num_layers: int = 1
    """number of fully connected layers; 0: the flattened convolutions go straight into the core (R2D2-style)"""
    filters: Counts = (32, 64, 64)
    """filters of the three convolutions (Nature DQN: 32,64,64); half as many cost about a third of the time"""

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
    """IMPALA's deep residual encoder: three stages of 16, 32 and 32 channels (Espeholt et al. 2018)."""

    hidden_size: int = 256
    """units of each fully connected layer after the convolutions (IMPALA: 256)"""
    num_layers: int = 1
    """number of fully connected layers (IMPALA: 1)"""

    def convolutions(self, channels: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (16, 32, 32):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(width), ResidualBlock(width)]
            channels = width
        return nn.Sequential(*layers, nn.ReLU())


@dataclass(frozen=True)
class SmallCnn:
    """Two 2x2 convolutions for images of a few pixels, no ReLU after the last layer (Ni et al. 2023)."""

    hidden_size: int = 100
    """units of each fully connected layer after the convolutions (Ni et al. 2023: 100)"""
    num_layers: int = 1
    """number of fully connected layers"""
    ends_linear: ClassVar[bool] = True

    def convolutions(self, channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 8, 2), nn.ReLU(), nn.Conv2d(8, 16, 2), nn.ReLU())


@dataclass(frozen=True)
class Mlp:
    """Multilayer perceptron: fully connected layers with ReLU on the flattened observation."""

    hidden_size: int = 64
    """units of each fully connected layer"""
    num_layers: int = 1
    """number of fully connected layers; 0: the flattened observation itself is the feature vector"""

    def convolutions(self, channels: int) -> nn.Sequential:
        return nn.Sequential()


@dataclass(frozen=True)
class Auto:
    """Encoder chosen by the observation: mlp for vectors, small-cnn for images below 36 pixels, shallow above."""


EncoderConfig = Auto | Shallow | Resnet | SmallCnn | Mlp


@dataclass(frozen=True)
class Net:
    """Inputs of the agent: the encoder, the frame stack, and the previous action and reward."""

    encoder: EncoderConfig = field(default_factory=Auto)
    """network from the observation to features"""
    frame_stack: int = 1
    """number of stacked frames per observation (Atari: 4); the agent's state holds the earlier ones"""
    prev_action: bool = True
    """feed the previous action to the core, one-hot (as IMPALA and R2D2 do)"""
    prev_reward: bool = True
    """feed the previous reward to the core, clipped to [-1, 1]"""
    action_units: int | None = None
    """units of a ReLU embedding of the previous action; None: the plain one-hot vector"""
    reward_units: int | None = None
    """units of a ReLU embedding of the previous reward; None: the plain number"""
    init: Literal["torch", "orthogonal"] = "torch"
    """weight initialisation of encoder and heads: PyTorch's default, or orthogonal (learns sooner from images)"""

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
    """Resolve `auto` for this observation, and reject an encoder that cannot read it."""
    pixels = min(spec.obs_shape[1:]) if spec.is_image else 0
    if isinstance(encoder, Auto):
        fitting = [cls for cls in (Shallow, SmallCnn) if pixels >= MIN_PIXELS[cls]]
        return fitting[0]() if fitting else Mlp()
    name = kebab(type(encoder))
    if not spec.is_image and not isinstance(encoder, Mlp):
        raise UserError(f"encoder {name} needs images, but {spec.name} has vector observations: use net.encoder:mlp")
    if spec.is_image and pixels < MIN_PIXELS[type(encoder)]:
        least = MIN_PIXELS[type(encoder)]
        raise UserError(f"encoder {name} needs at least {least} pixels a side, {spec.name} has {pixels}: use mlp")
    return encoder


class Encoder(nn.Module):
    """[N, ...] -> [N, width]: convolutions (for images), then fully connected layers with ReLU."""

    like: Tensor

    def __init__(self, cfg: EncoderConfig, spec: Spec, frame_stack: int) -> None:
        super().__init__()
        chosen = choose_encoder(cfg, spec)
        shape = (spec.obs_shape[0] * frame_stack, *spec.obs_shape[1:])
        self.scale = 1 / 255 if spec.obs_dtype == torch.uint8 else 1.0
        # channels_last makes CPU convolutions about twice as fast and computes the same function
        self.layout = torch.channels_last if spec.is_image else torch.contiguous_format
        self.convolutions = chosen.convolutions(shape[0]).to(memory_format=self.layout)  # type: ignore
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, *shape)).numel()
        widths = [flat, *[chosen.hidden_size] * chosen.num_layers]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.width = widths[-1]
        self.shape = shape
        self.ends_linear = getattr(chosen, "ends_linear", False)
        self.register_buffer("like", torch.empty(0), persistent=False)  # carries the device and the dtype

    def forward(self, obs: Tensor) -> Tensor:
        x = obs.to(self.like.dtype, memory_format=self.layout)
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        x = self.convolutions(x).flatten(1)
        for number, layer in enumerate(self.layers):
            x = layer(x) if self.ends_linear and number == len(self.layers) - 1 else F.relu(layer(x))
        return x

    def compile_to(self, program: "Program") -> int | None:
        """Append this encoder's instructions for compiled acting; None if a layer has no instruction."""
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
