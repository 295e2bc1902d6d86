"""The layers' side of the main_grad contract, in a table against plain autograd.

A fake owner hands out buffers as FSDP does (temporary, full of NaN, to be overwritten) or as DDP does (persistent, to
be added to). Three microbatches weigh 1, 10 and 100, so that a lost or doubled one shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.parallel.wgrad import WeightGradientStore
from tests.unit.parallel.sharding import relative_error

SPLITS = [3, 0, 5]


class Owner:
    """Stands in for FSDP (or DDP) of one weight."""

    def __init__(
        self, weight: nn.Parameter, dtype: torch.dtype, overwrite: bool, through_method: bool
    ) -> None:
        self.weight, self.overwrite, self.fetched = weight, overwrite, 0
        self.shape, self.dtype = weight.shape, dtype
        self.total = torch.zeros(weight.shape, dtype=torch.float64)
        self.buffer = torch.zeros(weight.shape, dtype=dtype)
        weight.overwrite_main_grad = overwrite
        weight.grad_added_to_main_grad = False
        if through_method:
            weight.__fsdp_param__ = True
            weight.get_main_grad = self.get_main_grad
        else:
            weight.main_grad = self.buffer
            self.prepare()

    def prepare(self) -> None:
        if self.overwrite:
            self.buffer.fill_(torch.nan)

    def get_main_grad(self) -> Tensor:
        self.fetched += 1
        if self.overwrite:
            self.buffer = torch.full(self.shape, torch.nan, dtype=self.dtype)
        return self.buffer

    def collect(self) -> None:
        """After a microbatch: what FSDP would reduce."""
        assert self.weight.grad_added_to_main_grad and self.weight.grad is None
        self.weight.grad_added_to_main_grad = False
        if self.overwrite:
            self.total += self.buffer.double()
            self.prepare()
        else:
            self.total = self.buffer.double()


Make = Callable[[TorchBackend], nn.Module]
LAYERS: dict[str, Make] = {
    "Linear": lambda b: b.Linear(8, 6),
    "LayerNormLinear": lambda b: b.LayerNormLinear(8, 6, return_layernorm_output=True),
    "LayerNormMLP": lambda b: b.LayerNormMLP(8, 12, activation="swiglu", normalization="RMSNorm"),
    "GroupedLinear": lambda b: b.GroupedLinear(3, 8, 6),
}
RECOMPUTE: dict[str, Callable[..., Any]] = {
    "plain": lambda f, *args: f(*args),
    "reentrant": lambda f, *args: checkpoint(f, *args, use_reentrant=True),
    "non-reentrant": lambda f, *args: checkpoint(f, *args, use_reentrant=False),
}


def _layer(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name](TorchBackend(LayerOptions(**options)))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    return layer


def _call(layer: nn.Module, x: Tensor, run: Callable[..., Any] = RECOMPUTE["plain"]) -> Tensor:
    arguments = (SPLITS,) if type(layer).__name__ == "GroupedLinear" else ()
    out = run(layer, x, *arguments)
    return out[0] + out[1].sum() if isinstance(out, tuple) else out


def _expected(name: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of plain autograd in float64 of the parameters as rounded to `dtype`, and of the input."""
    layer = _layer(name, params_dtype=dtype).double()
    x = _input(dtype).double().requires_grad_()
    for factor in (1, 10, 100):
        (_call(layer, x) * factor).sum().backward()
    return {n: p.grad for n, p in layer.named_parameters()}, x.grad


def _input(dtype: torch.dtype) -> Tensor:
    return torch.linspace(-2, 2, 64).view(8, 8).sin().to(dtype)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", LAYERS)
def test_three_microbatches_make_the_sum(name: str, recompute: str) -> None:
    """G10, G13: overwrite or accumulate, get_main_grad or main_grad, now or delayed, buffers of three dtypes."""
    cells = itertools.product(
        (False, True),
        (False, True),
        (False, True),
        ((torch.float32, torch.float32), (torch.float32, torch.float64), (torch.bfloat16, torch.float32)),
    )
    for overwrite, through_method, delayed, (dtype, buffer_dtype) in cells:
        cell = f"overwrite={overwrite} method={through_method} delayed={delayed} {dtype} {buffer_dtype}"
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
        layer = _layer(name, params_dtype=dtype, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        owners = [Owner(w, buffer_dtype, overwrite, through_method) for w in layer.gemm_weights()]
        x = _input(dtype).requires_grad_()
        for step, factor in enumerate((1, 10, 100), 1):
            (_call(layer, x, RECOMPUTE[recompute]) * factor).sum().backward()
            if delayed:
                # The buffer of a pending wgrad stays the one that backward fetched.
                layer.backward_dw()
            assert all(owner.fetched == (step if through_method else 0) for owner in owners), cell
            for owner in owners:
                owner.collect()
        expected, expected_x = _expected(name, dtype)
        weights = {id(w): owner for w, owner in zip(layer.gemm_weights(), owners, strict=True)}
        for n, p in layer.named_parameters():
            got = weights[id(p)].total if id(p) in weights else p.grad
            assert relative_error(got, expected[n]) < tolerance, (cell, n)
        assert relative_error(x.grad, expected_x) < tolerance, cell


def test_idle_expert_overwrites_with_zeros_and_leaves_alone_when_adding() -> None:
    """G13: buffers prefilled with 7; no tokens for expert 1, then none for anybody."""
    for overwrite, splits in itertools.product((True, False), (SPLITS, [0, 0, 0])):
        layer = _layer("GroupedLinear", fuse_wgrad_accumulation=True)
        for weight in layer.gemm_weights():
            weight.main_grad = torch.full(weight.shape, 7.0)
            weight.overwrite_main_grad = overwrite
        x = torch.ones(sum(splits), 8, requires_grad=True)
        layer(x, splits).sum().backward()
        for weight, tokens in zip(layer.gemm_weights(), splits, strict=True):
            assert weight.main_grad.eq((0.0 if overwrite else 7.0) + tokens).all()


def test_flag_is_remembered_from_forward() -> None:
    """As Transformer Engine's modules do: the owner's word at forward holds, not the one at backward."""
    layer = _layer("Linear", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full_like(layer.weight, torch.nan)
    layer.weight.overwrite_main_grad = True
    out = layer(torch.ones(1, 8))
    layer.weight.overwrite_main_grad = False
    out.sum().backward()
    assert layer.weight.main_grad.eq(1).all()


def test_delayed_gradient_goes_where_backward_fetched() -> None:
    layer = _layer("Linear", fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    fetched = layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer(torch.ones(1, 8)).sum().backward()
    assert fetched.eq(0).all() and not called
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer.backward_dw()
    assert fetched.eq(1).all() and layer.weight.main_grad.eq(0).all() and called == [1]
    assert layer.weight.skip_backward_post_hook


@pytest.mark.parametrize("name", LAYERS)
def test_delayed_and_unfused_adds_to_grad(name: str) -> None:
    layer = _layer(name, delay_wgrad_compute=True)
    for factor in (1, 10, 100):
        (_call(layer, _input(torch.float32)) * factor).sum().backward()
        layer.backward_dw()
    expected, _ = _expected(name, torch.float32)
    for n, p in layer.named_parameters():
        assert relative_error(p.grad, expected[n]) < 1e-6, n


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_frozen_parameters_and_inputs_without_gradient(name: str, fused: bool) -> None:
    """F05: every choice of one frozen parameter trains the rest; no buffer is asked for, none is needed."""
    expected, _ = _expected(name, torch.float32)
    for frozen in expected:
        layer = _layer(name, fuse_wgrad_accumulation=fused, delay_wgrad_compute=fused)
        parameters = dict(layer.named_parameters())
        parameters[frozen].requires_grad_(False)
        weights = {id(w) for w in layer.gemm_weights()}
        for p in parameters.values():
            if fused and id(p) in weights and p.requires_grad:
                p.main_grad = torch.zeros_like(p)
        for factor in (1, 10, 100):
            (_call(layer, _input(torch.float32)) * factor).sum().backward()
            layer.backward_dw()
        for n, p in parameters.items():
            got = p.main_grad if hasattr(p, "main_grad") else p.grad
            if n == frozen:
                assert got is None
            else:
                assert relative_error(got, expected[n]) < 1e-6, (frozen, n)


@pytest.mark.parametrize("name", LAYERS)
def test_all_frozen_passes_the_input_gradient(name: str) -> None:
    layer = _layer(name, fuse_wgrad_accumulation=True, delay_wgrad_compute=True).requires_grad_(False)
    x = _input(torch.float32).requires_grad_()
    _call(layer, x).sum().backward()
    layer.backward_dw()
    assert x.grad is not None and all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_no_grad_asks_for_nothing(name: str) -> None:
    layer = _layer(name, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        out = _call(layer, _input(torch.float32))
    assert not out.requires_grad


@pytest.mark.parametrize("name", LAYERS)
def test_meta_and_fake_tensors(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for device in ("meta", "cpu"):
        with FakeTensorMode() if device == "cpu" else torch.device("meta"):
            layer = _layer(name, device=device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
            for weight in layer.gemm_weights():
                weight.main_grad = torch.empty(weight.shape, device=device)
            x = torch.empty(8, 8, device=device, requires_grad=True)
            _call(layer, x).sum().backward()
            layer.backward_dw()
            assert x.grad.shape == x.shape


def test_missing_and_unfit_buffers_are_named() -> None:
    layer = _layer("Linear", fuse_wgrad_accumulation=True)
    with pytest.raises(RuntimeError, match=r"shape \(6, 8\) has no main_grad"):
        layer(torch.ones(1, 8)).sum().backward()
    layer.weight.main_grad = torch.zeros(8, 6).t()
    with pytest.raises(RuntimeError, match="must be contiguous"):
        layer(torch.ones(1, 8)).sum().backward()


def test_post_accumulate_hooks_fire_although_grad_stays_none() -> None:
    """FSDP counts on it: a fused weight's gradient is announced like any other."""
    layer = _layer("Linear", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    fired = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad))
    layer(torch.ones(1, 8)).sum().backward()
    assert fired == [None]


def test_store_refuses_more_pops_than_puts() -> None:
    with pytest.raises(RuntimeError, match="more often than backward"):
        WeightGradientStore(True).pop()
