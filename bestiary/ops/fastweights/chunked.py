"""Linear Transformer and Delta Net as matrix products over chunks of rows: plain PyTorch, on any device.

Both rules are W += k u^T; y = W^T q, where u is what a row writes. For the rows of a chunk, stacked, that is

    y = (q k^T * sees) u + q W;  W += k^T u,

with the W that enters the chunk and a lower-triangular `sees` of zeros and ones, which keeps episodes apart. Only u is
left to find. The Linear Transformer writes its values: u = v. What a row of the Delta Net writes depends on what the
rows before it wrote: u = beta (v - k W - (k k^T * sees, below the diagonal) u), a triangular system (Yang et al. 2024).
"""

import torch
from torch import Tensor

from bestiary.ops.fastweights.loops import FeatureMap, feature_map

CHUNK = 64  # rows; twice as many double the work within a chunk and halve the number of steps from chunk to chunk


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
    """widths: of query, key, value and, for the Delta Net, the strength of the write."""
    x, W, nan = _without_nan(x, reset, W)
    q, k, v, *beta = (z.contiguous() for z in x.permute(1, 2, 0, 3).split(widths, -1))  # [B, H, T, D]
    parts = feature_map(phi, q), feature_map(phi, k), v, *(z.sigmoid() for z in beta)

    lengths = _lengths(len(x), chunk, bptt)
    outputs, t = [], 0
    for new, *rows in zip(reset.split(lengths), *(z.split(lengths, 2) for z in parts), strict=True):
        if bptt and t % bptt == 0:
            W = W.detach()
        y, W = _chunk(new, W, *rows)
        outputs.append(y.permute(2, 0, 1, 3))
        t += len(new)
    return torch.cat(outputs).add_(nan[..., None]), W + nan[-1, ..., None, None]


def _chunk(
    reset: Tensor, W: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """reset: [C, B]; q, k, v, y: [B, H, C, D]; beta: [B, H, C, 1]."""
    episode = reset.T.cumsum(-1)[:, None]  # [B, 1, C], from 0: the episode that W belongs to
    recalls = (episode == 0)[..., None]
    sees = (episode[..., :, None] == episode[..., None, :]).tril().to(W.dtype)  # [B, 1, row, earlier row]
    u = v
    if beta is not None:
        told = beta * k
        missing = beta * v - torch.where(recalls, told @ W, 0)
        u = torch.linalg.solve_triangular((told @ k.mT).mul_(sees), missing, upper=False, unitriangular=True)
    y = (q @ k.mT).mul_(sees) @ u + torch.where(recalls, q @ W, 0)
    # what the last row sees is what leaves the chunk
    W = torch.where(recalls[:, :, -1:], W, 0) + k.mT @ (u * sees[:, :, -1:].mT)
    return y, W


def _lengths(rows: int, chunk: int, bptt: int | None) -> list[int]:
    """Of the chunks: none is longer than `chunk`, and one begins wherever the gradient is cut."""
    period = bptt or rows
    pieces = [min(period, rows - start) for start in range(0, rows, period)]
    return [min(chunk, piece - start) for piece in pieces for start in range(0, piece, chunk)]


def _without_nan(x: Tensor, reset: Tensor, W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x and W without rows and memories that hold a NaN or an infinity; NaN for the rows that would see one, else 0.

    The products multiply by zero what a row does not see, but zero times NaN is NaN: one spoilt row would reach the
    whole chunk. A query is seen by its own row alone and may stay as it is.
    """
    lost = ~W.detach().sum((-2, -1)).isfinite()  # [B, H]
    spoilt = ~x.detach()[..., W.shape[-1] :].sum(-1).isfinite()  # [T, B, H]
    so_far = spoilt.cumsum(0) + lost.int()
    before_episode = torch.where(reset[..., None], so_far - spoilt.int(), 0).cummax(0).values
    nan = torch.where(so_far > before_episode, torch.nan, 0.0).to(x.dtype)
    return torch.where(spoilt[..., None], 0, x), torch.where(lost[..., None, None], 0, W), nan
