"""The four fast-weight rules: every form of every rule against reference data and against the plain loop."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fast_weights import CASES, FINAL, GOLDEN, INPUTS, apply, gradients, load, tracked
from numba import njit
from torch import Tensor

from bestiary.ops import simd
from bestiary.ops.fastweights import chunked, cpu, kernels, loops

RULES = ("linear_transformer", "delta_net", "recurrent_delta_net", "delta_rnn")
FORMS = {"loop": loops, "kernel": cpu, "chunked": chunked}


def forms_of_rules(*forms: str) -> pytest.MarkDecorator:
    found = [(form, rule) for form in forms for rule in RULES if hasattr(FORMS[form], rule)]
    return pytest.mark.parametrize("form, rule", [pytest.param(FORMS[f], rule, id=f"{f}-{rule}") for f, rule in found])


every_form = forms_of_rules("loop", "kernel", "chunked")
fast_forms = forms_of_rules("kernel", "chunked")


def example(rule: str, T: int = 9, B: int = 3, H: int = 2, D: int = 8, density: float = 0.1) -> dict[str, Any]:
    """Random inputs in float64. With resets there is one at the first step, at the last, and at block boundaries."""
    width = {"linear_transformer": 3 * D, "delta_rnn": 5 * D + 2}.get(rule, 3 * D + 1)
    shapes = {"x": (T, B, H, width), "W0": (B, H, D, D)}
    if rule == "recurrent_delta_net":
        shapes |= {"R_q": (H, D, D), "R_k": (H, D, D), "R_v": (H, D, D), "r_beta": (H, D), "y0": (B, H, D)}
    if rule == "delta_rnn":
        shapes |= {"R0": (B, H, D, D), "y0": (B, H, D)}
    x: dict[str, Any] = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    x["reset"] = torch.rand(T, B) < density
    if density:
        x["reset"][0, 0] = x["reset"][-1, -1] = x["reset"][kernels.BLOCK :: kernels.BLOCK, 1] = True
    return x


def everything(
    form: ModuleType, rule: str, x: dict[str, Any], bptt: int | None = None, **more: Any
) -> dict[str, Tensor]:
    """Outputs, last memories, and the gradients of a weighted sum of them all."""
    x = tracked(x)
    out = apply(form, rule, x, bptt, **more)
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(z.shape, generator=rng, dtype=z.dtype) for z in out.values()]
    loss = torch.stack([(w * z).sum() for w, z in zip(weights, out.values(), strict=True)]).sum()
    return {n: z.detach() for n, z in out.items()} | {f"grad_{n}": g for n, g in gradients(loss, x).items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Errors count relative to 1 + |value|."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = ((found[name] - value).abs() / (1 + value.abs())).max().item()
        assert error <= tolerance, f"{name} is off by {error:.2e}"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the last bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} differs"


# Against reference data of other programs


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Errors count relative to the largest entry."""
    for name, grad in found.items():
        error = (grad - expected[name]).abs().max().item()
        assert error <= tolerance * expected[name].abs().max().item(), f"gradient of {name} is off by {error:.2e}"


golden_precision = pytest.mark.parametrize(
    "dtype, output_tolerance, gradient_tolerance",
    [
        pytest.param(torch.float64, 1e-10, 1e-10, id="float64"),
        pytest.param(torch.float32, 2e-6, 1e-5, id="float32"),
    ],
)


def golden_forms(cases: list[str]) -> pytest.MarkDecorator:
    found = [(n, f, case) for case in cases for n, f in FORMS.items() if hasattr(f, case.split("/")[0])]
    return pytest.mark.parametrize("form, case", [pytest.param(f, case, id=f"{n}-{case}") for n, f, case in found])


@golden_precision
@golden_forms(CASES)
def test_reference_outputs_states_and_gradients(
    form: ModuleType, case: str, dtype: torch.dtype, output_tolerance: float, gradient_tolerance: float
):
    x = tracked(load(case, dtype))
    out = apply(form, case.split("/")[0], x)
    assert_close(out, {name: x[name] for name in out}, output_tolerance)
    grads = gradients((out["y"] * x["g"]).sum(), x)
    assert_gradients(grads, {name: x[f"grad_{name}"] for name in grads}, gradient_tolerance)


@golden_precision
@golden_forms([case for case in CASES if f"{case}/trunc1_grad_q" in GOLDEN.files])
def test_reference_gradients_truncated_at_every_step(
    form: ModuleType, case: str, dtype: torch.dtype, output_tolerance: float, gradient_tolerance: float
):
    x = tracked(load(case, dtype))
    out = apply(form, case.split("/")[0], x, bptt=1)
    assert_close(out, {name: x[name] for name in out}, output_tolerance)
    grads = gradients((out["y"] * x["g"]).sum(), x)
    nothing = {name: torch.zeros_like(x[name]) for name in ("W0", "R0", "y0") if name in x}
    assert_gradients(
        grads, {n: nothing[n] if n in nothing else x[f"trunc1_grad_{n}"] for n in grads}, gradient_tolerance
    )


# Against the loop


@fast_forms
@pytest.mark.parametrize(
    "T, D, H, density, phi, bptt",
    [
        (1, 8, 1, 0.0, "elu", None),
        (1, 3, 2, 1.0, "softmax", 1),
        (1, 1, 2, 0.1, "silu", 4),
        (5, 1, 1, 0.0, "softmax", None),
        (5, 3, 2, 0.1, "elu", None),
        (5, 8, 1, 0.1, "silu", 1),
        (33, 1, 2, 1.0, "elu", 1),
        (33, 3, 1, 0.0, "silu", 4),
        (33, 8, 2, 0.1, "softmax", None),
        (70, 1, 1, 0.1, "elu", 4),
        (70, 3, 1, 0.1, "softmax", 1),
        (70, 3, 2, 1.0, "silu", None),
        (70, 8, 2, 0.1, "elu", None),
        (70, 8, 1, 0.1, "silu", None),
        (70, 8, 2, 0.0, "softmax", 4),
    ],
)
def test_fast_forms_equal_the_loop(
    form: ModuleType, rule: str, T: int, D: int, H: int, density: float, phi: str, bptt: int | None
):
    x = example(rule, T, H=H, D=D, density=density) | {"phi": phi}
    assert_close(everything(form, rule, x, bptt), everything(loops, rule, x, bptt))


@pytest.mark.parametrize("rule", ["linear_transformer", "delta_net"])
@pytest.mark.parametrize("chunk", [1, 7, 20, 70, 100])
@pytest.mark.parametrize("bptt", [None, 20])
def test_the_length_of_a_chunk_changes_nothing(rule: str, chunk: int, bptt: int | None):
    x = example(rule, T=70)
    assert_close(everything(chunked, rule, x, bptt, chunk=chunk), everything(loops, rule, x, bptt))


# Guarantees to callers


@every_form
def test_without_gradients_the_outputs_are_the_same(form: ModuleType, rule: str):
    x = tracked(example(rule, T=40))
    expected = {name: z.detach() for name, z in apply(form, rule, x).items()}
    with torch.no_grad():
        assert_equal(apply(form, rule, x), expected)


@every_form
def test_inputs_are_not_changed(form: ModuleType, rule: str):
    x = example(rule)
    before = {name: z.clone() for name, z in x.items()}
    everything(form, rule, x)
    assert_equal(x, before)


@every_form
def test_inputs_may_have_any_memory_layout(form: ModuleType, rule: str):
    x = example(rule, T=40)
    strewn = {
        n: z.permute(*reversed(range(z.dim()))).contiguous().permute(*reversed(range(z.dim()))) for n, z in x.items()
    }
    assert not strewn["x"].is_contiguous()
    assert not strewn["W0"].is_contiguous()
    assert_close(everything(form, rule, strewn), everything(form, rule, x))


@every_form
@pytest.mark.parametrize("how", ["permuted", "expanded"])
def test_gradients_may_have_any_memory_layout(form: ModuleType, rule: str, how: str):
    x = tracked(example(rule))
    y, W = list(apply(form, rule, x).values())[:2]
    arriving = [torch.randn(z.shape[::-1], dtype=z.dtype).permute(3, 2, 1, 0) for z in (y, W)]
    if how == "expanded":
        arriving = [torch.ones((), dtype=z.dtype).expand(z.shape) for z in (y, W)]
    assert not any(g.is_contiguous() for g in arriving)
    leaves = [z for name, z in x.items() if name in INPUTS]
    found = torch.autograd.grad((y, W), leaves, arriving, retain_graph=True)
    expected = torch.autograd.grad((y, W), leaves, [g.contiguous() for g in arriving])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rule", RULES)
def test_the_number_of_threads_changes_nothing(rule: str, torch_threads: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "MIN_STEPS_PER_THREAD", 1)
    x = example(rule, T=40)  # six streams, divided unevenly among four threads
    torch.set_num_threads(1)
    expected = everything(cpu, rule, x)
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert_equal(everything(cpu, rule, x), expected)


@every_form
def test_an_actor_and_a_learner_may_call_at_once(
    form: ModuleType, rule: str, torch_threads: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu, "MIN_STEPS_PER_THREAD", 1)
    examples = [example(rule, T=T) for T in (3, 40)]
    expected = [everything(form, rule, x) for x in examples]

    def call(x: dict[str, Any]) -> list[dict[str, Tensor]]:
        torch.set_num_threads(2)  # of this thread alone
        return [everything(form, rule, x) for _ in range(5)]

    with ThreadPoolExecutor(2) as callers:
        for found, right in zip(callers.map(call, examples), expected, strict=True):
            for one in found:
                assert_equal(one, right)


# Divergence


def finite_rows(y: Tensor) -> Tensor:
    return y.isfinite().all(-1)  # [T, B, H]


@every_form
@pytest.mark.parametrize("phi", ["elu", "softmax", "silu"])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("step", [2, 3])
def test_a_nan_or_infinity_shows_until_its_episode_ends(form: ModuleType, rule: str, phi: str, bad: float, step: int):
    x = example(rule, density=0) | {"phi": phi}
    x["reset"][2] = x["reset"][6] = True
    places = range(x["x"].shape[-1]) if math.isnan(bad) else range(3 * 8)  # sigmoid(infinity) = 1
    for place in places:
        x_bad = x | {"x": x["x"].clone()}
        x_bad["x"][step, 1, 0, place] = bad
        out = apply(form, rule, x_bad)
        fine = finite_rows(out["y"])
        assert not fine[step, 1, 0]
        fine[step:6, 1, 0] = True
        assert fine.all(), "not only this episode of this stream"
        assert all(out[name].isfinite().all() for name in FINAL if name in out)


@every_form
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_reset_clears_a_memory_that_diverged(form: ModuleType, rule: str, bad: float):
    x = example(rule, density=0)
    x["reset"][0, 0] = x["reset"][4, 1] = True
    for name in ("W0", "R0", "y0"):
        if name in x:
            x_bad = x | {name: x[name].clone()}
            x_bad[name][:2] = bad
            out = apply(form, rule, x_bad)
            fine = finite_rows(out["y"])
            assert fine[:, 0].all()
            assert fine[:, 2].all()
            assert fine[4:, 1].all()
            assert math.isinf(bad) or not fine[:4, 1].any()  # the recurrent input is tanh(infinity) = 1
            assert all(out[final].isfinite().all() for final in FINAL if final in out)


# SIMD vectors


@njit(cache=True)
def exp_rows(x, y, lanes):
    for i in range(len(x)):
        simd.store(y, (i, 0), lanes, simd.exp(simd.load(x, (i, 0), lanes)))


@njit(cache=True)
def softmax_rows(x, y, lanes):
    for i in range(len(x)):
        simd.store(y, (i, 0), lanes, kernels._softmax(simd.load(x, (i, 0), lanes), 0.0))


def by_rows(function: Any, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    function(x, y, (0,) * x.shape[1])
    return y


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_is_right_to_a_few_units_in_the_last_place(dtype: type):
    x = np.linspace(-80, 80, 80_000, dtype=dtype).reshape(-1, 8)
    exact = np.exp(x.astype(np.longdouble))
    units = np.abs(by_rows(exp_rows, x) - exact) / np.spacing(exact.astype(dtype))
    assert units.max() < 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_of_nan_is_nan_and_of_extremes_is_close_to_its_limits(dtype: type):
    x = np.array([[math.nan, 0, -math.inf, math.inf, -1e30, 1e30, math.nan, 1]], dtype)
    found = by_rows(exp_rows, x)[0]
    assert np.isnan(found[[0, 6]]).all()
    assert found[1] == 1
    assert (found[[2, 4]] < 2e-38).all()
    assert (found[[3, 5]] > 1e38).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax_of_large_numbers_does_not_overflow(dtype: type):
    x = np.array([[1e4, 1e4, -1e4, 0, 0, 0, 0, 0], [-1e30, -1e30] + [-2e30] * 6, [3e38, -3e38] + [0] * 6], dtype)
    expected = torch.from_numpy(x).softmax(-1).numpy()
    np.testing.assert_allclose(by_rows(softmax_rows, x), expected, rtol=1e-6, atol=1e-30)
