"""What TE 2.20's layers do with main_grad, pinned: docs/main_grad_contract.md rests on these.

A test that fails after an upgrade of TE is news about TE, not a bug of ours. Tests named `fault` pin what TE
does wrong and megatron/fsdp/main_grad.py lives with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te.checks import assert_close, give_persistent_buffer, give_temporary_buffer
from tests.te.engine import device, in_te_process, load

IN, OUT, ROWS = 16, 24, 8
SPLITS = [3, 0, 5]


def linear(**options: Any) -> Any:
    """A fused fp32 te.Linear."""
    defaults = {"device": device(), "params_dtype": torch.float32, "fuse_wgrad_accumulation": True}
    return load().Linear(IN, OUT, **(defaults | options))


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Input, output gradient, and the weight gradient they give."""
    x = torch.randn(ROWS, IN, dtype=dtype, device=device())
    dy = torch.randn(ROWS, OUT, dtype=dtype, device=device())
    return x, dy, dy.t() @ x


@in_te_process
def test_the_first_microbatch_overwrites_where_te_is_told_which_one_it_is() -> None:
    layer, (x, dy, gradient) = linear(), operands()
    give_persistent_buffer(layer.weight, fill=7.0)
    for first, multiple in ((True, 1), (False, 2), (True, 1)):
        layer(x, is_first_microbatch=first).backward(dy)
        assert_close(f"is_first_microbatch={first}", layer.weight.main_grad, multiple * gradient)


@in_te_process
def test_without_grad_added_to_main_grad_autograd_gets_nothing_but_hooks_fire() -> None:
    layer, (x, dy, _) = linear(), operands()
    layer.weight.main_grad = torch.zeros(OUT, IN, device=device())
    fired: list[str] = []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("post accumulate"))
    layer(x).backward(dy)
    assert layer.weight.grad is None
    assert fired == ["post accumulate"]


@in_te_process
def test_with_grad_added_to_main_grad_autograd_gets_a_shared_dummy() -> None:
    (x, dy, _), layers = operands(), [linear(), linear()]
    for layer in layers:
        give_persistent_buffer(layer.weight)
        layer(x).backward(dy)
        assert layer.weight.grad_added_to_main_grad
    first, second = (layer.weight.grad for layer in layers)
    assert first.data_ptr() == second.data_ptr(), "one uninitialised tensor for all weights of a shape"
    layers[0].weight.grad, layers[0].weight.zero_out_wgrad = None, True
    layers[0](x).backward(dy)
    assert (layers[0].weight.grad == 0).all()


@in_te_process
def test_fault_a_weight_used_twice_under_overwrite_keeps_the_last_write_only() -> None:
    layer = load().Linear(
        IN, IN, bias=False, device=device(), params_dtype=torch.float32, fuse_wgrad_accumulation=True
    )
    x, weight = torch.randn(ROWS, IN, device=device()), layer.weight.detach().clone().requires_grad_()
    F.linear(F.linear(x, weight), weight).sum().backward()
    give_persistent_buffer(layer.weight, fill=0.0)
    layer(layer(x)).sum().backward()
    assert_close("accumulating, both uses count", layer.weight.main_grad, weight.grad)
    temporary = give_temporary_buffer(layer.weight)
    layer.weight.grad = None
    layer(layer(x)).sum().backward()
    assert temporary.calls == 2, "one fetch a use"
    assert (layer.weight.main_grad - weight.grad).abs().max() > 1e-2, "the other use is lost"


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear"])
@in_te_process
def test_a_frozen_weight_needs_no_buffer(name: str) -> None:
    layer = getattr(load(), name)(
        IN, OUT, device=device(), params_dtype=torch.float32, fuse_wgrad_accumulation=True
    )
    layer.weight.requires_grad_(False)
    x = torch.randn(ROWS, IN, device=device(), requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
@in_te_process
def test_layer_norm_mlp_with_one_frozen_weight(frozen: str) -> None:
    layer = load().LayerNormMLP(
        IN, 32, device=device(), params_dtype=torch.float32, fuse_wgrad_accumulation=True
    )
    getattr(layer, frozen).requires_grad_(False)
    trained = getattr(layer, "fc2_weight" if frozen == "fc1_weight" else "fc1_weight")
    give_persistent_buffer(trained, fill=0.0)
    layer(torch.randn(ROWS, IN, device=device(), requires_grad=True)).sum().backward()
    assert trained.grad_added_to_main_grad
    assert trained.main_grad.abs().sum() > 0


@in_te_process
def test_modules_read_the_flag_in_forward_and_ops_in_backward() -> None:
    x, dy, gradient = operands()
    layer = linear()
    give_persistent_buffer(layer.weight, fill=1.0)
    y = layer(x)
    layer.weight.overwrite_main_grad = True
    y.backward(dy)
    assert_close("te.Linear: set after forward comes too late", layer.weight.main_grad, gradient + 1)
    op = load().ops.BasicLinear(IN, OUT, device=device(), dtype=torch.float32, accumulate_into_main_grad=True)
    give_persistent_buffer(op.weight, fill=1.0)
    y = op(x)
    op.weight.overwrite_main_grad = True
    y.backward(dy)
    assert_close("te.ops.BasicLinear: set after forward counts", op.weight.main_grad, gradient)


@in_te_process
def test_fault_ops_basic_linear_returns_the_real_gradient_too_when_overwriting() -> None:
    x, dy, gradient = operands()
    op = load().ops.BasicLinear(IN, OUT, device=device(), dtype=torch.float32, accumulate_into_main_grad=True)
    give_persistent_buffer(op.weight, fill=1.0)
    op(x).backward(dy)
    assert_close("accumulating", op.weight.main_grad, gradient + 1)
    assert op.weight.grad_added_to_main_grad
    op.weight.grad = None
    give_temporary_buffer(op.weight)
    op(x).backward(dy)
    assert_close("overwriting", op.weight.main_grad, gradient)
    assert op.weight.grad_added_to_main_grad is False
    assert_close("and to autograd", op.weight.grad, gradient)


@in_te_process
def test_fault_ops_grouped_linear_refuses_a_buffer_that_is_made_in_backward() -> None:
    x, dy, _ = operands()
    op = load().ops.GroupedLinear(
        3, IN, OUT, device=device(), dtype=torch.float32, bias=False, accumulate_into_main_grad=True
    )
    weights = [getattr(op, f"weight{i}") for i in range(3)]
    temporary = [give_temporary_buffer(weight) for weight in weights]
    splits = torch.tensor(SPLITS, device=device())
    with pytest.raises(RuntimeError, match="MAIN GRAD NOT FOUND"):
        op(x, splits)
    for weight, buffer in zip(weights, temporary, strict=True):
        weight.main_grad = buffer.buffer
    op(x, splits).backward(dy)
    for weight, a, b in zip(weights, x.split(SPLITS), dy.split(SPLITS), strict=True):
        assert_close("an expert without tokens gets zeros", weight.main_grad, b.t() @ a)
        assert weight.grad_added_to_main_grad


@in_te_process
def test_delayed_wgrad_fetches_in_backward_and_writes_later() -> None:
    x, dy, gradient = operands()
    layer = linear(bias=False, delay_wgrad_compute=True)
    assert layer.weight.skip_backward_post_hook
    give_persistent_buffer(layer.weight, fill=1.0)
    hooks: list[int] = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
    layer(x).backward(dy)
    assert (layer.weight.main_grad == 1).all(), "nothing is written yet"
    assert layer.weight.grad_added_to_main_grad, "though it says so"
    fetched = layer.weight.main_grad
    layer.weight.main_grad = torch.zeros_like(fetched)
    layer.backward_dw()
    assert_close("written is what backward fetched", fetched, gradient + 1)
    assert (layer.weight.main_grad == 0).all()
    assert hooks == [1]


@in_te_process
def test_fault_delayed_and_unfused_keeps_the_last_microbatch_only() -> None:
    x, dy, gradient = operands()
    layer = linear(bias=False, delay_wgrad_compute=True, fuse_wgrad_accumulation=False)
    for _ in range(2):
        layer(x).backward(dy)
        layer.backward_dw()
    assert_close(".grad is assigned, not added to", layer.weight.grad, gradient)


@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
@in_te_process
def test_fault_delayed_layer_norm_mlp_with_a_frozen_weight_fails(frozen: str) -> None:
    options = {"device": device(), "params_dtype": torch.float32, "delay_wgrad_compute": True}
    layer = load().LayerNormMLP(IN, 32, **options)
    getattr(layer, frozen).requires_grad_(False)
    layer(torch.randn(ROWS, IN, device=device(), requires_grad=True)).sum().backward()
    with pytest.raises(RuntimeError, match="Pop empty queue"):
        layer.backward_dw()


@in_te_process
def test_fault_delayed_and_unfused_grouped_linear_gives_autograd_uninitialised_gradients() -> None:
    options = {"device": device(), "params_dtype": torch.float32, "delay_wgrad_compute": True}
    layer = load().GroupedLinear(3, IN, OUT, bias=False, **options)
    x, dy, _ = operands()
    layer(x, SPLITS).backward(dy)
    assert layer.weight0.grad is not None
    layer.backward_dw()
    assert_close("the real one is assigned", layer.weight0.grad, dy[:3].t() @ x[:3])


@in_te_process
def test_fault_split_parameters_and_fusion_fail_together() -> None:
    layer = linear(bias=False, parameters_split={"q": 8, "k": 8, "v": 8})
    for parameter in layer.parameters():
        give_persistent_buffer(parameter)
    x, dy, _ = operands()
    with pytest.raises(Exception):  # noqa: B017  which one is TE's affair
        layer(x).backward(dy)


BUFFERS = {
    "bf16": (lambda: torch.zeros(OUT, IN, dtype=torch.bfloat16), None),
    "fp32": (lambda: torch.zeros(OUT, IN), None),
    "fp16": (lambda: torch.zeros(OUT, IN, dtype=torch.float16), RuntimeError),
    "flat": (lambda: torch.zeros(OUT * IN), RuntimeError),
    "transposed": (lambda: torch.zeros(IN, OUT).t(), ValueError),
    "none": (lambda: None, AttributeError),
}


@pytest.mark.parametrize("kind", BUFFERS)
@in_te_process
def test_which_buffers_a_bf16_weight_accepts(kind: str) -> None:
    make, error = BUFFERS[kind]
    x, dy, gradient = operands(torch.bfloat16)
    layer = linear(bias=False, params_dtype=torch.bfloat16)
    buffer = make()
    layer.weight.main_grad = buffer if buffer is None else buffer.to(device())
    if error is None:
        layer(x).backward(dy)
        assert_close("main_grad", layer.weight.main_grad, gradient, 2e-2)
        return
    with pytest.raises(error):
        layer(x).backward(dy)


@in_te_process
def test_grouped_linear_asks_the_first_expert_for_all() -> None:
    x, dy, _ = operands()
    layer = load().GroupedLinear(
        3, IN, OUT, bias=False, device=device(), params_dtype=torch.float32, fuse_wgrad_accumulation=True
    )
    for index in range(3):
        give_persistent_buffer(getattr(layer, f"weight{index}"), fill=1.0)
    layer.weight0.overwrite_main_grad = True
    layer(x, SPLITS).backward(dy)
    for index, (a, b) in enumerate(zip(x.split(SPLITS), dy.split(SPLITS), strict=True)):
        assert_close(f"expert {index}", getattr(layer, f"weight{index}").main_grad, b.t() @ a)


@in_te_process
def test_an_idle_expert_is_left_alone_when_accumulating() -> None:
    x, dy, _ = operands()
    layer = load().GroupedLinear(
        3, IN, OUT, bias=False, device=device(), params_dtype=torch.float32, fuse_wgrad_accumulation=True
    )
    for index in range(3):
        give_persistent_buffer(getattr(layer, f"weight{index}"), fill=1.0)
    layer(x, SPLITS).backward(dy)
    assert (layer.weight1.main_grad == 1).all()


@pytest.mark.parametrize("recompute", ["torch-reentrant", "torch", "te-reentrant", "te"])
@in_te_process
def test_under_recompute_the_buffer_is_fetched_once_in_backward(recompute: str) -> None:
    te, (x, dy, gradient) = load(), operands()
    layer = linear()
    temporary = give_temporary_buffer(layer.weight)
    reentrant = recompute.endswith("reentrant")
    checkpoint = te.checkpoint if recompute.startswith("te") else torch.utils.checkpoint.checkpoint
    y = checkpoint(layer, x.requires_grad_(), use_reentrant=reentrant)
    assert temporary.calls == 0
    y.backward(dy)
    assert temporary.calls == 1
    assert_close("main_grad", layer.weight.main_grad, gradient)
