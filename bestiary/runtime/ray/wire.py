"""What travels between processes: trees of arrays, and weights as one flat one."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bestiary import tree


def pack(tensors: Any) -> Any:
    """Tensors as arrays: these are put into shared memory as they are, and read from there without a copy."""
    return tree.map(lambda x: x.detach().cpu().numpy(), tensors)


def unpack(arrays: Any) -> Any:
    """Arrays as tensors of one's own: shared memory must not be written to."""
    return tree.map(lambda x: torch.from_numpy(np.array(x)), arrays)


class Flat:
    """The weights of one network as bytes in a row, in the order of its state_dict."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.like = {name: (x.dtype, x.shape, x.numel() * x.element_size()) for name, x in weights.items()}

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self.like.values())

    def pack(self, weights: dict[str, Tensor]) -> NDArray[np.uint8]:
        parts = [weights[name].detach().cpu().contiguous().flatten() for name in self.like]
        return np.concatenate([part.numpy().view(np.uint8) for part in parts if part.numel()])

    def unpack(self, flat: NDArray[np.uint8]) -> dict[str, Tensor]:
        whole, found, at = np.array(flat), {}, 0
        assert whole.size == self.bytes, "weights of another network"
        for name, (dtype, shape, size) in self.like.items():
            # a copy: where a number may begin depends on its kind
            part: Any = torch.from_numpy(whole[at : at + size].copy())
            found[name] = part.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
            at += size
        return found
