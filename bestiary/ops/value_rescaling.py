"""Values squeezed so that scores of any size can be learnt by one network (Pohlen et al. 2018).

h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x. Written as they stand, h and its inverse subtract numbers that are nearly
equal and lose most of their digits near zero; here both are products and quotients of positive numbers.
"""

import torch
from torch import Tensor


def value_rescale(x: Tensor, eps: float) -> Tensor:
    """h. With a = |x|: sqrt(a + 1) - 1 = a / (sqrt(a + 1) + 1)."""
    return x / ((x.abs() + 1).sqrt() + 1) + eps * x


def value_rescale_inverse(z: Tensor, eps: float) -> Tensor:
    """h's inverse. With w = sqrt(|x| + 1) - 1 one has |z| = w (1 + 2 eps + eps w), and |x| = w (w + 2)."""
    a, b = z.abs(), 1 + 2 * eps
    w = 2 * a / (b + (b * b + 4 * eps * a).sqrt())
    return torch.copysign(w * (w + 2), z)
