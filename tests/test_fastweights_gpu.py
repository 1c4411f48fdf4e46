"""The Triton kernels against reference data and the plain loop: on a GPU, or in Triton's interpreter without one.

Triton reads TRITON_INTERPRET when it is imported, and is then changed for the whole process, so the kernels run in a
process of their own.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from helpers.fast_weights import CASES, FINAL, INPUTS, apply, gradients, load, tracked
from torch import Tensor

from bestiary.ops.fastweights import loops

triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = ("linear_transformer", "delta_net", "recurrent_delta_net", "delta_rnn")
B, H = 2, 2


def outputs_and_gradients(form: Any, rule: str, x: dict[str, Any], bptt: int | None) -> dict[str, Tensor]:
    """g and g_W_T, g_R_T are the gradients with respect to the outputs and the final memories."""
    x = tracked(x)
    out = apply(form, rule, x, bptt)
    loss = (out["y"] * x["g"]).sum()
    for name in FINAL:
        if f"g_{name}" in x:
            loss = loss + (out[name] * x[f"g_{name}"]).sum()
    return {n: y.detach() for n, y in out.items()} | {f"grad_{n}": g for n, g in gradients(loss, x).items()}


def on_device(x: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in x.items()}


def through_kernels(rule: str, x: dict[str, Any], bptt: int | None, block: int) -> dict[str, Tensor]:
    from bestiary.ops.fastweights import gpu

    gpu.BLOCK = block
    return on_device(outputs_and_gradients(gpu, rule, on_device(x, DEVICE), bptt), "cpu")


def outputs_of_kernels(rule: str, x: dict[str, Any]) -> dict[str, Tensor]:
    from bestiary.ops.fastweights import gpu

    with torch.no_grad():
        return on_device(apply(gpu, rule, on_device(x, DEVICE)), "cpu")


def build_for_cuda(rule: str, x: dict[str, Any]) -> list[str]:
    """Compile the kernels that the call would launch, for a device that need not exist; returns their names."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bestiary.ops.fastweights import gpu

    built = []

    def build(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int, **constants: Any) -> None:
        types = {torch.float32: "*fp32", torch.int32: "*i32", torch.bool: "*i1"}
        kinds = ["i32" if isinstance(a, int) else types[a.dtype] for a in args]
        signature = dict(zip(kernel.arg_names, kinds + ["constexpr"] * len(constants), strict=True))
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": num_warps})
        built.append(kernel.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", build)
        outputs_and_gradients(gpu, rule, x, bptt=None)
    return built


@pytest.fixture(scope="module")
def kernels() -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            yield process


def random_inputs(rule: str, T: int, D: int, phi: loops.FeatureMap, dtype: torch.dtype) -> dict[str, Any]:
    shapes = dict.fromkeys(("q", "k", "v", "g"), (T, B, H, D)) | {"W0": (B, H, D, D), "g_W_T": (B, H, D, D)}
    if rule != "linear_transformer":
        shapes["beta"] = (T, B, H)
    if rule == "recurrent_delta_net":
        shapes |= {"R_q": (H, D, D), "R_k": (H, D, D), "R_v": (H, D, D), "r_beta": (H, D), "y0": (B, H, D)}
    if rule == "delta_rnn":
        shapes |= {"kr": (T, B, H, D), "vr": (T, B, H, D), "betar": (T, B, H), "y0": (B, H, D)}
        shapes |= {"R0": (B, H, D, D), "g_R_T": (B, H, D, D)}
    x: dict[str, Any] = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    reset = torch.rand(T, B) < 0.2
    reset[0] = torch.tensor([True, False])  # else no gradient would reach the initial memory
    return x | {"reset": reset, "phi": phi, "softmax_eps": 1e-6}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=atol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", [c for c in CASES if "T7_B3_H2_D8" in c])
def test_reference_outputs_states_and_gradients(kernels: ProcessPoolExecutor, case: str):
    x = load(case, torch.float64)
    found = kernels.submit(through_kernels, case.split("/")[0], x, bptt=None, block=4).result()
    assert_same(found, {name: x[name] for name in ("y", *FINAL) if name in x}, atol=1e-10)
    assert_same(found, {f"grad_{n}": x[f"grad_{n}"] for n in INPUTS if n in x}, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_reference_gradients_truncated_at_every_step(kernels: ProcessPoolExecutor, rule: str):
    x = load(f"{rule}/T7_B3_H2_D8", torch.float64)
    found = kernels.submit(through_kernels, rule, x, bptt=1, block=4).result()
    start = {"W0", "R0", "y0"}  # constants in that case
    assert_same(found, {f"grad_{n}": x[f"trunc1_grad_{n}"] for n in INPUTS if n in x.keys() - start}, atol=1e-10)


@pytest.mark.parametrize("T, D, bptt", [(7, 6, None), (5, 4, 1), (8, 6, 3)])
@pytest.mark.parametrize("phi", ["elu", "softmax", "silu"])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_equal_the_loop(
    kernels: ProcessPoolExecutor, rule: str, phi: loops.FeatureMap, T: int, D: int, bptt: int | None
):
    x = random_inputs(rule, T, D, phi, torch.float64)
    found = kernels.submit(through_kernels, rule, x, bptt, block=2).result()
    assert_same(found, outputs_and_gradients(loops, rule, x, bptt), atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_acting_gives_the_same_outputs_in_single_precision(kernels: ProcessPoolExecutor, rule: str):
    x = random_inputs(rule, T=2, D=5, phi="elu", dtype=torch.float32)
    assert_same(kernels.submit(outputs_of_kernels, rule, x).result(), apply(loops, rule, x), atol=1e-5)


def test_the_kernels_compile_for_cuda(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for rule in RULES:
            built = process.submit(build_for_cuda, rule, random_inputs(rule, 3, 6, "elu", torch.float32)).result()
            assert built == [f"{rule}_forward", f"{rule}_backward"]
