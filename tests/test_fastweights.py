"""The four fast-weight rules: every form of every rule against reference data and against the plain loop."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bestiary.ops.fastweights import cpu, loops
from bestiary.ops.fastweights.loops import Recurrence

GOLDEN = np.load(Path(__file__).parent / "data" / "fast_weights.npz")
CASES = sorted({"/".join(key.split("/")[:2]) for key in GOLDEN.files if "/" in key})
FORMS = {"loop": loops, "kernel": cpu}
INPUTS = ("q", "k", "v", "beta", "kr", "vr", "betar", "R_q", "R_k", "R_v", "r_beta", "W0", "R0", "y0")
FINAL = ("W_T", "R_T", "y_T")


def load(case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    names = [key.split("/")[2] for key in GOLDEN.files if key.startswith(case + "/")]
    data = {name: torch.from_numpy(GOLDEN[f"{case}/{name}"]) for name in names}
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in data.items()}


def apply(form: ModuleType, rule: str, x: dict[str, Any], bptt: int | None = None) -> dict[str, Tensor]:
    parts = [x[name] for name in ("q", "k", "v", "kr", "vr") if name in x]
    parts += [x[name][..., None] for name in ("beta", "betar") if name in x]
    inputs = torch.cat(parts, -1), x["reset"], x["W0"]
    if rule in ("linear_transformer", "delta_net"):
        y, W = getattr(form, rule)(*inputs, x.get("phi", "elu"), bptt)
        return {"y": y, "W_T": W}
    phi = x.get("phi", "softmax")
    if rule == "recurrent_delta_net":
        R = Recurrence(x["R_q"], x["R_k"], x["R_v"], x["r_beta"])
        y, W = form.recurrent_delta_net(inputs[0], R, *inputs[1:], x["y0"], phi, bptt)
        return {"y": y, "W_T": W, "y_T": y[-1]}
    y, W, R = form.delta_rnn(*inputs, x["R0"], x["y0"], phi, bptt, float(x["softmax_eps"]))
    return {"y": y, "W_T": W, "R_T": R, "y_T": y[-1]}


def gradients(loss: Tensor, x: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in INPUTS if name in x]
    found = torch.autograd.grad(loss, [x[name] for name in names], allow_unused=True)
    return {n: torch.zeros_like(x[n]) if f is None else f for n, f in zip(names, found, strict=True)}


def tracked(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: v.clone().requires_grad_() if name in INPUTS else v for name, v in x.items()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("case", CASES)
def test_reference_outputs_states_and_gradients(case: str, form: ModuleType):
    x = tracked(load(case, torch.float64))
    out = apply(form, case.split("/")[0], x)
    for name in ("y", *FINAL):
        if name in x:
            torch.testing.assert_close(out[name], x[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    for name, grad in gradients((out["y"] * x["g"]).sum(), x).items():
        torch.testing.assert_close(
            grad, x[f"grad_{name}"], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"grad_{n}: {m}"
        )
