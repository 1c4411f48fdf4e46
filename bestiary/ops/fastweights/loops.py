"""The four fast-weight rules as written in the papers, one time step after the other: the reference for fast forms.

x: [T, B, H, ...], the concatenated outputs of the slow network: query, key and value of width D and the write
strength, all before feature map and sigmoid. y: [T, B, H, D]; reset: [T, B]; a memory (fast weights) W: [B, H, D, D],
key by value. Where reset is true the memory is zero before the step. `bptt` truncates the gradient: the memory before
steps 0, bptt, 2 bptt, ... is a constant.
"""
# pyright: reportConstantRedefinition=false

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RULES = ("linear_transformer", "delta_net", "recurrent_delta_net", "delta_rnn")
FeatureMap = Literal["elu", "softmax", "silu"]
PREVIOUS_EPS = 1e-6  # added to the denominator of Delta RNN's softmax of its previous output


def feature_map(name: FeatureMap, x: Tensor) -> Tensor:
    """The feature map phi of queries and keys. Its bounded norm keeps the delta rule stable.

    elu: (ELU + 1) over its sum; softmax; silu: SiLU over its Euclidean norm.
    """
    if name == "softmax":
        return x.softmax(-1)
    if name == "elu":
        x = F.elu(x) + 1
        return x / (x.sum(-1, keepdim=True) + 1e-5)
    x = F.silu(x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Recurrence(NamedTuple):
    """Recurrent weights of the Recurrent Delta Net: from its last output to query, key, value and write strength."""

    q: Tensor  # [H, D, D], from output to query
    k: Tensor  # [H, D, D]
    v: Tensor  # [H, D, D]
    beta: Tensor  # [H, D]


def read(W: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", W, q)


def delta_write(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The delta rule (Widrow & Hoff 1960; Schlag et al. 2021): W + beta k (v - W^T k)^T."""
    return W + torch.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - read(W, k)))


def carry(t: int, reset: Tensor, bptt: int | None, *memory: Tensor) -> tuple[Tensor, ...]:
    """The memories before step t: zero after a reset, constants where the gradient is truncated."""
    kept = [torch.where(reset.view(-1, *[1] * (m.dim() - 1)), 0, m) for m in memory]
    return tuple(m.detach() if bptt is not None and t % bptt == 0 else m for m in kept)


def linear_transformer(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    """W += k v^T; y = W^T q (Katharopoulos et al. 2020). x: q, k, v."""
    q, k, v = x.chunk(3, -1)
    q, k = feature_map(phi, q), feature_map(phi, k)
    outputs: list[Tensor] = []
    for t, (q_t, k_t, v_t, new) in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), reset.unbind(), strict=True)):
        (W,) = carry(t, new, bptt, W)
        W = W + torch.einsum("bhk,bhv->bhkv", k_t, v_t)
        outputs.append(read(W, q_t))
    return torch.stack(outputs), W


def delta_net(
    x: Tensor, reset: Tensor, W: Tensor, phi: FeatureMap = "elu", bptt: int | None = None
) -> tuple[Tensor, Tensor]:
    """W += beta k (v - W^T k)^T; y = W^T q (Schlag et al. 2021). x: q, k, v, beta."""
    D = W.shape[-1]
    q, k, v, beta = x.split_with_sizes([D, D, D, 1], -1)
    q, k, beta = feature_map(phi, q), feature_map(phi, k), beta.squeeze(-1).sigmoid()
    outputs: list[Tensor] = []
    steps = zip(q.unbind(), k.unbind(), v.unbind(), beta.unbind(), reset.unbind(), strict=True)
    for t, (q_t, k_t, v_t, beta_t, new) in enumerate(steps):
        (W,) = carry(t, new, bptt, W)
        W = delta_write(W, k_t, v_t, beta_t)
        outputs.append(read(W, q_t))
    return torch.stack(outputs), W


def recurrent_delta_net(
    x: Tensor,
    R: Recurrence,
    reset: Tensor,
    W: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Delta Net with recurrent connections from its last output y: [B, H, D] (Irie et al. 2021). x: q, k, v, beta."""
    D = W.shape[-1]
    outputs: list[Tensor] = []
    steps = zip(*(part.unbind() for part in x.split_with_sizes([D, D, D, 1], -1)), reset.unbind(), strict=True)
    for t, (q_t, k_t, v_t, beta_t, new) in enumerate(steps):
        W, y = carry(t, new, bptt, W, y)
        u = y.tanh()
        q_t, k_t = (feature_map(phi, z + torch.einsum("bhi,hij->bhj", u, r)) for z, r in ((q_t, R.q), (k_t, R.k)))
        v_t = v_t + torch.einsum("bhi,hij->bhj", u, R.v)
        beta_t = torch.sigmoid(beta_t.squeeze(-1) + torch.einsum("bhi,hi->bh", u, R.beta))
        W = delta_write(W, k_t, v_t, beta_t)
        y = read(W, q_t)
        outputs.append(y)
    return torch.stack(outputs), W


def delta_rnn(
    x: Tensor,
    reset: Tensor,
    W: Tensor,
    R: Tensor,
    y: Tensor,
    phi: FeatureMap = "softmax",
    bptt: int | None = None,
    eps: float = PREVIOUS_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = W^T q + R^T softmax(last y), both memories written by the delta rule (Irie et al. 2021).

    x: q, k, v, second k, second v, beta, second beta.
    """
    D = W.shape[-1]
    q, k, v, kr, vr, beta = x.split_with_sizes([D, D, D, D, D, 2], -1)
    q, k, kr = (feature_map(phi, z) for z in (q, k, kr))
    beta, betar = beta.sigmoid().unbind(-1)
    outputs: list[Tensor] = []
    steps = zip(*(z.unbind() for z in (q, k, v, beta, kr, vr, betar, reset)), strict=True)
    for t, (q_t, k_t, v_t, beta_t, kr_t, vr_t, betar_t, new) in enumerate(steps):
        W, R, y = carry(t, new, bptt, W, R, y)
        W = delta_write(W, k_t, v_t, beta_t)
        R = delta_write(R, kr_t, vr_t, betar_t)
        p = (y - y.detach().amax(-1, keepdim=True)).exp()
        y = read(W, q_t) + read(R, p / (p.sum(-1, keepdim=True) + eps))
        outputs.append(y)
    return torch.stack(outputs), W, R
