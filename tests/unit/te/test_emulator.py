"""The emulator itself: what it refuses, and that it stays in its own processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.pool import REPOSITORY_ROOT
from tests.te.engine import compiled, extension, in_te_process, load

pytestmark = pytest.mark.skipif(compiled(), reason="a compiled Transformer Engine is used instead")


def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, **changes: object) -> torch.Tensor:
    """b a^T, by the argument list that TE uses."""
    names = (
        "bias",
        "bias_type",
        "gelu",
        "gelu_in",
        "grad",
        "workspace",
        "workspace_size",
        "accumulate",
        "split",
    )
    values = dict.fromkeys(names, None) | {"gelu": False, "grad": False, "accumulate": False} | changes
    positional = [values[name] for name in names]
    quantizer, dtype = changes.get("quantizer"), changes.get("dtype")
    return extension().generic_gemm(a, True, b, False, out, quantizer, dtype, *positional)[0]


def refused(call: object, *words: str) -> None:
    with pytest.raises((AssertionError, NotImplementedError, RuntimeError, ValueError)) as raised:
        call()  # type: ignore[operator]
    for word in words:
        assert word in str(raised.value), f"{word!r} not in {raised.value}"


def test_this_process_is_untouched() -> None:
    assert not isinstance(torch.Tensor.is_cuda, property)
    assert "transformer_engine_torch" not in sys.modules
    assert not torch.zeros(1).is_cuda


@in_te_process
def test_the_worker_sees_a_gpu_only_from_inside_te() -> None:
    te = load()
    assert not torch.zeros(1).is_cuda
    assert not torch.cuda.is_available()
    assert sys.modules[te.Linear.__module__].torch.cuda.is_available()
    assert torch.empty(0, device="meta").device.type == "meta"
    assert "triton" not in sys.modules or hasattr(sys.modules["triton"], "__file__")


@in_te_process
def test_unknown_kernels_are_importable_and_refused_by_name_when_called() -> None:
    kernel = extension().fused_attn_fwd
    refused(kernel, "fused_attn_fwd", "not emulated")


@in_te_process
def test_quantised_formats_are_refused_by_name() -> None:
    te = load()
    from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling

    def run(recipe: object) -> None:
        with te.autocast(enabled=True, recipe=recipe):
            te.Linear(32, 32, device="cpu")(torch.randn(32, 32))

    refused(lambda: run(Float8BlockScaling()), "12.9")  # TE's own words about the pretended device
    refused(lambda: run(MXFP8BlockScaling()), "10.0")

    class SomeQuantizer:
        pass

    a, b = torch.randn(4, 8), torch.randn(2, 8)
    refused(lambda: gemm(a, b, None, quantizer=SomeQuantizer()), "generic_gemm", "SomeQuantizer")
    refused(
        lambda: extension().rmsnorm_fwd(a, b[0], 1e-5, None, SomeQuantizer(), a.dtype, 0, False),
        "SomeQuantizer",
    )
    refused(lambda: extension().swiglu(a, SomeQuantizer()), "SomeQuantizer")
    refused(lambda: gemm(a, b, None, dtype=extension().DType.kFloat8E4M3), "kFloat8E4M3")


@in_te_process
def test_userbuffers_and_float64_are_refused_by_name() -> None:
    refused(lambda: extension().CommOverlap(), "userbuffers")
    a = torch.randn(4, 8, dtype=torch.float64)
    refused(lambda: gemm(a, a, None), "float64")


@in_te_process
def test_gemms_keep_the_rules_of_cublaslt() -> None:
    a, b = torch.randn(4, 8), torch.randn(2, 8)
    torch.testing.assert_close(gemm(a, b, None), b @ a.t())
    out = torch.full((2, 4), float("nan"))
    torch.testing.assert_close(gemm(a, b, out, dtype=torch.float32), b @ a.t())
    torch.testing.assert_close(gemm(a, b, out, dtype=torch.float32, accumulate=True), 2 * (b @ a.t()))
    refused(lambda: gemm(a, b.bfloat16(), None), "differ in dtype")
    refused(lambda: gemm(a, torch.randn(2, 9), None), "inner dims")
    refused(lambda: gemm(a, b, torch.zeros(4, 2).t(), dtype=torch.float32), "not contiguous")
    refused(lambda: gemm(a, b, torch.zeros(8), dtype=torch.float32), "invalid dims")
    refused(lambda: gemm(a.bfloat16(), b.bfloat16(), None, dtype=torch.float16), "no cuBLASLt GEMM")


def test_install_after_an_import_of_te_is_an_error() -> None:
    code = (
        "import sys, types; sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')\n"
        "from tests.te.emulator import install\n"
        "install()"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "must be installed before the first import" in ended.stderr
