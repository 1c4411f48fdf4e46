"""Reference data of the fast-weight rules, and a uniform call of every form of every rule."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bestiary.ops.fastweights.loops import PREVIOUS_EPS, Recurrence

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "fast_weights.npz")
CASES = sorted({"/".join(key.split("/")[:2]) for key in GOLDEN.files if "/" in key})
PARTS = ("q", "k", "v", "kr", "vr", "beta", "betar")  # the parts of x, when given one by one
INPUTS = (*PARTS, "x", "R_q", "R_k", "R_v", "r_beta", "W0", "R0", "y0")
FINAL = ("W_T", "R_T", "y_T")


def load(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    names = [key.split("/")[2] for key in GOLDEN.files if key.startswith(case + "/")]
    data = {name: torch.from_numpy(GOLDEN[f"{case}/{name}"]) for name in names}
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in data.items()}


def apply(form: ModuleType, rule: str, x: dict[str, Any], bptt: int | None = None, **more: Any) -> dict[str, Tensor]:
    parts = [x[name] if x[name].dim() == 4 else x[name][..., None] for name in PARTS if name in x]
    inputs = x["x"] if "x" in x else torch.cat(parts, -1), x["reset"], x["W0"]
    if rule in ("linear_transformer", "delta_net"):
        y, W = getattr(form, rule)(*inputs, x.get("phi", "elu"), bptt, **more)
        return {"y": y, "W_T": W}
    phi = x.get("phi", "softmax")
    if rule == "recurrent_delta_net":
        R = Recurrence(x["R_q"], x["R_k"], x["R_v"], x["r_beta"])
        y, W = form.recurrent_delta_net(inputs[0], R, *inputs[1:], x["y0"], phi, bptt)
        return {"y": y, "W_T": W, "y_T": y[-1]}
    y, W, R = form.delta_rnn(*inputs, x["R0"], x["y0"], phi, bptt, float(x.get("softmax_eps", PREVIOUS_EPS)))
    return {"y": y, "W_T": W, "R_T": R, "y_T": y[-1]}


def gradients(loss: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in INPUTS if name in x]
    found = torch.autograd.grad(loss, [x[name] for name in names], allow_unused=True)
    return {n: torch.zeros_like(x[n]) if f is None else f for n, f in zip(names, found, strict=True)}


def tracked(x: dict[str, Any]) -> dict[str, Any]:
    return {name: v.detach().requires_grad_() if name in INPUTS else v for name, v in x.items()}
