"""Value rescaling, by which one network learns values of any scale (Pohlen et al. 2018).

h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x. In this form h and its inverse subtract nearly equal numbers and lose most
of their digits near zero; the functions here use products and quotients of positive numbers.
"""

import torch
from torch import Tensor


def value_rescale(x: Tensor, eps: float) -> Tensor:
    """h(x). With a = |x|: sqrt(a + 1) - 1 = a / (sqrt(a + 1) + 1)."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def value_rescale_inverse(z: Tensor, eps: float) -> Tensor:
    """h^-1(z). With w = sqrt(|x| + 1) - 1: |z| = w (1 + 2 eps + eps w), and |x| = w (w + 2)."""
    a, b = z.abs(), 1 + 2 * eps
    w = 2 * a / (b + (b * b + 4 * eps * a).sqrt())
    return torch.copysign(w * (w + 2), z)
