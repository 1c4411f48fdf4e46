"""Linear Transformer and Delta Net in chunkwise parallel form: matrix products in plain PyTorch, on any device.

Both rules are W += k u^T; y = W^T q, where u is the written value. For the stacked steps of a chunk this is

    y = (q k^T * mask) u + q W;  W += k^T u,

with the W before the chunk and a lower-triangular 0/1 `mask`, which also separates episodes. The Linear Transformer
writes its values: u = v. The value that the Delta Net writes at a step depends on those of earlier steps:
u = beta (v - k W - (k k^T * mask, below the diagonal) u), a triangular system (Yang et al. 2024).
"""
# pyright: reportConstantRedefinition=false, reportUnknownMemberType=false

from typing import cast

import torch
from torch import Tensor

from bestiary.ops.fastweights.loops import FeatureMap, feature_map

CHUNK = 64  # time steps; doubling it doubles the work within chunks and halves the number of sequential chunks


def linear_transformer(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    D = W.shape[-1]
    return _by_chunks([D, D, D], x, reset, W, phi, bptt, chunk)


def delta_net(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    D = W.shape[-1]
    return _by_chunks([D, D, D, 1], x, reset, W, phi, bptt, chunk)


def _by_chunks(
    widths: list[int], x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap, bptt: int | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """widths: of query, key, value and, for the Delta Net, the write strength."""
    x, W, nan = _without_nan(x, reset, W)
    q, k, v, *beta = (z.contiguous() for z in x.permute(1, 2, 0, 3).split_with_sizes(widths, -1))  # [B, H, T, D]
    parts = feature_map(phi, q), feature_map(phi, k), v, *(z.sigmoid() for z in beta)

    lengths = _chunk_lengths(len(x), chunk, bptt)
    outputs: list[Tensor] = []
    t = 0
    for new, *inputs in zip(
        reset.split_with_sizes(lengths), *(z.split_with_sizes(lengths, 2) for z in parts), strict=True
    ):
        if bptt and t % bptt == 0:
            W = W.detach()
        y, W = _chunk(new, W, *inputs)
        outputs.append(y.permute(2, 0, 1, 3))
        t += len(new)
    return torch.cat(outputs).add_(nan[..., None]), W + nan[-1, ..., None, None]


def _chunk(
    reset: Tensor, W: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reset: [C, B]; q, k, v, y: [B, H, C, D]; beta: [B, H, C, 1]."""
    episode = reset.T.cumsum(-1)[:, None]  # [B, 1, C] episode number within the chunk; 0: the episode that W belongs to
    in_first = (episode == 0)[..., None]
    mask = (episode[..., :, None] == episode[..., None, :]).tril().to(W.dtype)  # [B, 1, step, earlier step]
    u = v
    if beta is not None:
        beta_k = beta * k
        rhs = beta * v - torch.where(in_first, beta_k @ W, 0)
        A = (beta_k @ k.mT).mul_(mask)
        u = cast(Tensor, torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True))
    y = (q @ k.mT).mul_(mask) @ u + torch.where(in_first, q @ W, 0)
    # the memory after the chunk holds what the last step can read
    W = torch.where(in_first[:, :, -1:], W, 0) + k.mT @ (u * mask[:, :, -1:].mT)
    return y, W


def _chunk_lengths(T: int, chunk: int, bptt: int | None) -> list[int]:
    """Lengths of the chunks: at most `chunk`, and a new chunk begins wherever the gradient is truncated."""
    period = bptt or T
    pieces = [min(period, T - start) for start in range(0, T, period)]
    return [min(chunk, piece - start) for piece in pieces for start in range(0, piece, chunk)]


def _without_nan(x: Tensor, reset: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x and W with non-finite steps and memories replaced by 0; also NaN for the steps that must output NaN, else 0.

    The products multiply masked entries by zero, but 0 * NaN is NaN: one non-finite step would reach the whole chunk.
    A query is read at its own step only and may stay as it is.
    """
    bad_memory = ~W.detach().sum((-2, -1)).isfinite()  # [B, H]
    bad_step = ~x.detach()[..., W.shape[-1] :].sum(-1).isfinite()  # [T, B, H]
    bad_so_far = bad_step.cumsum(0) + bad_memory.int()
    before_episode = torch.where(reset[..., None], bad_so_far - bad_step.int(), 0).cummax(0).values
    nan = torch.where(bad_so_far > before_episode, torch.nan, 0.0).to(x.dtype)
    return torch.where(bad_step[..., None], 0, x), torch.where(bad_memory[..., None, None], 0, W), nan
