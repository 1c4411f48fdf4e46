"""Message formats between processes: trees of NumPy arrays, and weights as one flat array of bytes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree

FlatWeights = NDArray[np.uint8]  # all weights of a network, concatenated


def pack(tensors: Any) -> Any:
    """Convert tensors to arrays. Ray stores arrays in shared memory, where readers need no copy."""
    return tree.map(lambda x: x.detach().cpu().numpy(), tensors)


def unpack(arrays: Any) -> Any:
    """Convert arrays to tensors. The copy is needed because arrays in shared memory are read-only."""
    return tree.map(lambda x: torch.from_numpy(np.array(x)), arrays)


class WeightsCodec:
    """Encodes the weights of one network as bytes, in the order of its state_dict, and decodes them."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.layout = {name: (x.dtype, x.shape, x.numel() * x.element_size()) for name, x in weights.items()}

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self.layout.values())

    def encode(self, weights: dict[str, Tensor]) -> FlatWeights:
        parts = [weights[name].detach().cpu().contiguous().flatten() for name in self.layout]
        return np.concatenate([part.numpy().view(np.uint8) for part in parts if part.numel()])

    def decode(self, flat: FlatWeights) -> dict[str, Tensor]:
        whole, weights, start = np.array(flat), {}, 0
        assert whole.size == self.bytes, "weights of another network"
        for name, (dtype, shape, size) in self.layout.items():
            # the copy restores the alignment that the dtype requires
            part: Any = torch.from_numpy(whole[start : start + size].copy())
            weights[name] = part.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            start += size
        return weights
