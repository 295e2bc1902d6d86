"""megatron/fsdp/main_grad.py against real TE layers, one process, every case: who overwrites, who adds, where
to.

A stand-in for the parameter group owns plain buffers, full of NaN when fresh, and the layers' own uses of the
contract fill them: 17 models x temporary and persistent buffers x microbatches one after the other or all
forwards first x recompute x is_first_microbatch x delayed wgrad. test_contract_table.py does the same through
FSDP over ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.te.checks import NAN
from tests.te.cover import Cell, full_product, name_of, pair_cover
from tests.te.engine import in_te_process
from tests.te.models import (
    MODELS,
    NEVER_DELAYED,
    call,
    delayed_layers,
    layer_options,
    loss_of,
    microbatch,
    run_delayed,
)

MICROBATCHES, STEPS = 3, 2
AXES: dict[str, tuple[Any, ...]] = {
    "buffers": ("temporary", "persistent"),
    "order": ("one-by-one", "forwards-first"),
    "recompute": ("none", "torch", "torch-reentrant"),
    "tell_first": (False, True),
    "delay": ("none", "forward-order", "reverse-order"),
}


class Buffers:
    """What MainGrad asks of a parameter group, with one buffer a parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.pass_id = 0
        self.parameters = list(model.parameters())
        self.views = [torch.full_like(p, NAN, requires_grad=False) for p in self.parameters]

    def open_window(self) -> None:
        """Always open: `new_window` does the work."""

    def gradient_view(self, index: int) -> Tensor:
        """The buffer of parameter `index`."""
        return self.views[index]


class Table:
    """The gradients of one model under the contract."""

    def __init__(self, model: nn.Module, temporary: bool, overwrite_known: bool) -> None:
        from megatron.fsdp.main_grad import MainGrad, delays_wgrad, is_te_ops

        self.model, self.buffers = model, Buffers(model)
        sites: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                sites.setdefault(id(parameter), []).append(module)
        # As in a parameter group: one answer for all, so that the experts of a GroupedLinear agree.
        operations = any(is_te_ops(module) for users in sites.values() for module in users)
        overwrite = temporary and overwrite_known and not operations
        self.main_grads = [
            MainGrad(f"p{index}", parameter, self.buffers, index, overwrite, torch.float32)
            for index, parameter in enumerate(self.buffers.parameters)
        ]
        by_parameter = {id(main_grad.parameter): main_grad for main_grad in self.main_grads}
        for main_grad in self.main_grads:
            parameter = main_grad.parameter
            main_grad.delaying = [module for module in sites[id(parameter)] if delays_wgrad(module)]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: by_parameter[id(p)].collect())
        for layer in delayed_layers(model):
            mine = [by_parameter[id(parameter)] for parameter in layer.parameters(recurse=False)]
            layer.register_wgrad_accumulation_and_reduce_hooks(lambda mine=mine: finish(mine))

    def new_window(self) -> None:
        """What the buffers hold no longer counts."""
        for main_grad, view in zip(self.main_grads, self.buffers.views, strict=True):
            main_grad.reset()
            view.fill_(NAN)

    def backward(self, loss: Tensor) -> None:
        """One pass."""
        self.buffers.pass_id += 1
        loss.backward()

    def close(self) -> list[Tensor]:
        """The gradients of the window."""
        for main_grad in self.main_grads:
            main_grad.close()
        return [view.clone() for view in self.buffers.views]


def finish(main_grads: list[Any]) -> None:
    """backward_dw() of their layer has run."""
    for main_grad in main_grads:
        main_grad.collect()


def twins(name: str, delayed: bool) -> tuple[nn.Module, nn.Module]:
    """(unfused reference, fused model), equal weights."""
    torch.manual_seed(1)
    reference = MODELS[name](layer_options(False, False))
    model = MODELS[name](layer_options(True, delayed))
    with torch.no_grad():
        for got, want in zip(model.parameters(), reference.parameters(), strict=True):
            got.copy_(want)
    return reference, model


def reference_gradients(reference: nn.Module, index: int, recompute: str, accumulate: bool) -> list[Tensor]:
    """Autograd's, of one microbatch or of all so far."""
    if not accumulate:
        reference.zero_grad()
    loss_of(call(reference, microbatch(index), recompute)).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in reference.parameters()]


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    """Relative to the largest value of each tensor; NaN is infinite."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        error = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-9)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def run_cell(name: str, cell: Cell, overwrite_known: bool) -> float:
    """Largest error over all windows of two steps."""
    temporary, delayed = cell["buffers"] == "temporary", cell["delay"] != "none"
    reference, model = twins(name, delayed)
    table = Table(model, temporary, overwrite_known)
    layers = delayed_layers(model)
    if cell["delay"] == "reverse-order":
        layers.reverse()
    # Without overwrite, TE must not be told to overwrite by is_first_microbatch either: that is the owner's
    # word.
    windows = range(MICROBATCHES) if temporary else [MICROBATCHES - 1]
    worst = 0.0

    def forward(index: int) -> Tensor:
        options = {}
        if cell["tell_first"]:
            options["is_first_microbatch"] = temporary or index == 0
        return loss_of(call(model, microbatch(index), cell["recompute"], **options))

    for _ in range(STEPS):
        table.new_window()
        reference.zero_grad()
        ahead = (
            [forward(index) for index in range(MICROBATCHES)] if cell["order"] == "forwards-first" else None
        )
        for index in range(MICROBATCHES):
            if temporary:
                table.new_window()
            table.backward(ahead[index] if ahead else forward(index))
            want = reference_gradients(reference, index, cell["recompute"], accumulate=not temporary)
            if index in windows:
                for layer in layers:
                    run_delayed(layer)
                worst = max(worst, largest_error(table.close(), want))
    return worst


def possible(name: str, cell: Cell) -> bool:
    """Delayed wgrad goes with no recompute here."""
    return cell["delay"] == "none" or (cell["recompute"] == "none" and name not in NEVER_DELAYED)


@pytest.mark.parametrize("grid", ["pairs", pytest.param("product", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
@in_te_process
def test_every_case_gives_the_sum_of_all_uses(name: str, grid: str) -> None:
    """Fault replays: P10 (a module called twice), F05 (frozen and fused), F06 (unused, sometimes used)."""
    from megatron.models.backends.transformer_engine import probe
    from tests.te.engine import device

    found = probe(device())
    wrong = {}
    choose = pair_cover if grid == "pairs" else full_product
    for cell in choose(AXES, lambda cell: possible(name, cell)):
        if cell["delay"] != "none" and not found.delayed_wgrad:
            continue
        error = run_cell(name, cell, found.overwrite_modules)
        if not error < 1e-6:
            wrong[name_of(cell)] = error
    assert not wrong, f"{len(wrong)} wrong: {wrong}"


def test_the_table_has_its_size() -> None:
    cells = sum(len(full_product(AXES, lambda cell, n=name: possible(n, cell))) for name in MODELS)
    assert cells >= 592
