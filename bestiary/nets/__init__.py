"""Networks around the memory: encoders, the frame stack, the torso, heads and optimisers."""

from bestiary.nets.encoders import (
    Auto,
    Encoder,
    EncoderConfig,
    Mlp,
    Net,
    ResidualBlock,
    Resnet,
    Shallow,
    SmallCnn,
    choose_encoder,
)
from bestiary.nets.frame_stack import FrameStack, gather_steps
from bestiary.nets.heads import Dueling, head, orthogonal
from bestiary.nets.torso import Torso

__all__ = [
    "Auto",
    "Dueling",
    "Encoder",
    "EncoderConfig",
    "FrameStack",
    "Mlp",
    "Net",
    "ResidualBlock",
    "Resnet",
    "Shallow",
    "SmallCnn",
    "Torso",
    "choose_encoder",
    "gather_steps",
    "head",
    "orthogonal",
]
