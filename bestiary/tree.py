"""Functions of trees of tensors: nested tuples, named tuples, lists and dicts."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

Tree = TypeVar("Tree")


@overload
def map(fn: Callable[[Tensor], Any], tree: Tree, /) -> Tree: ...
@overload
def map(fn: Callable[[Tensor, Tensor], Any], tree: Tree, other: Tree, /) -> Tree: ...
@overload
def map(fn: Callable[..., Any], /, *trees: Tree) -> Tree: ...
def map(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `fn` to the corresponding leaves of trees of the same structure."""
    first: Any = trees[0]
    if first is None:
        return None  # type: ignore
    if isinstance(first, dict):
        return type(first)((k, map(fn, *(t[k] for t in trees))) for k in first)  # type: ignore
    if isinstance(first, tuple | list):
        leaves = [map(fn, *branches) for branches in zip(*trees, strict=True)]
        return type(first)(*leaves) if hasattr(first, "_fields") else type(first)(leaves)  # type: ignore
    return fn(*trees)


def stack(trees: Sequence[Tree], dim: int = 0) -> Tree:
    return map(lambda *leaves: torch.stack(leaves, dim), *trees)


def cat(trees: Sequence[Tree], dim: int = 0) -> Tree:
    return trees[0] if len(trees) == 1 else map(lambda *leaves: torch.cat(leaves, dim), *trees)


def narrow(tree: Tree, dim: int, start: int, length: int) -> Tree:
    return map(lambda leaf: leaf.narrow(dim, start, length), tree)


def to_device(tree: Tree, device: torch.device) -> Tree:
    return map(lambda leaf: leaf.to(device, non_blocking=True), tree)


def size(tree: Any) -> int:
    """Size of all leaves in bytes."""
    found: list[int] = []
    map(lambda leaf: found.append(leaf.numel() * leaf.element_size()), tree)
    return sum(found)


def where(mask: Tensor, yes: Tree, no: Tree) -> Tree:
    """Choose for each entry of the batch: leaves are [B, ...], `mask` is [B]."""
    return map(lambda y, n: torch.where(mask.view(-1, *[1] * (y.dim() - 1)), y, n), yes, no)
