"""What the installed Transformer Engine knows of the main_grad contract, found out by running it.

Version numbers are no proof (backports, local builds), so a small layer is run once per process and looked
at. For orientation, what the releases have:

| TE   | get_main_grad | overwrite: modules | overwrite: te.ops | dummy wgrad | delayed wgrad |
|------|---------------|--------------------|-------------------|-------------|---------------|
| 2.6  | yes           | no                 | no                | yes         | no hooks      |
| 2.9  | yes           | yes                | yes               | yes         | yes           |
| 2.12 | yes           | yes                | yes               | yes         | yes           |
| 2.20 | yes           | yes                | yes, and returns  | yes         | yes           |

docs/main_grad_contract.md says what each column means.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from megatron.models.backends.base import LayerOptions
from megatron.models.backends.transformer_engine.loading import engine_version, load_engine

SIZE = 16


@dataclass(frozen=True)
class Capabilities:
    """What the installed TE does with a weight under fuse_wgrad_accumulation.

    Attributes:
        version: (major, minor).
        get_main_grad: a weight with `__fsdp_param__` has its buffer fetched by `get_main_grad()`.
        overwrite_modules: te.Linear and its kin honour `overwrite_main_grad`.
        overwrite_grouped: te.GroupedLinear honours it.
        overwrite_ops: te.ops honour it.
        ops_return_real_wgrad: te.ops in overwrite mode also give the gradient to autograd (counted twice if
        added).
        dummy_wgrad: where the weight has `grad_added_to_main_grad`, autograd gets a dummy instead of nothing.
        delayed_wgrad: modules with `delay_wgrad_compute` tell when `backward_dw` has run (hooks).
    """

    version: tuple[int, ...]
    get_main_grad: bool
    overwrite_modules: bool
    overwrite_grouped: bool
    overwrite_ops: bool
    ops_return_real_wgrad: bool
    dummy_wgrad: bool
    delayed_wgrad: bool

    def __str__(self) -> str:
        flags = [f.name for f in fields(self) if getattr(self, f.name) is True]
        version = ".".join(map(str, self.version))
        return f"Transformer Engine {version}: {', '.join(flags) or 'none of the contract'}"


def check_contract(found: Capabilities, options: LayerOptions) -> None:
    """Raise ValueError where the installed TE cannot do what `options` ask for, naming flag and fix."""
    if options.delay_wgrad_compute and not found.delayed_wgrad:
        raise ValueError(f"--delay-wgrad-compute needs a newer Transformer Engine than {found}; leave it out")
    overwrites = found.get_main_grad and found.overwrite_modules and found.overwrite_grouped
    if options.fuse_wgrad_accumulation and not overwrites:
        raise ValueError(
            "gradient accumulation fusion needs Transformer Engine 2.9 or later, which overwrites main_grad "
            f"when told to; here is {found}. Use --no-gradient-accumulation-fusion"
        )


class _Buffers:
    """Two buffers for one weight, so that the probe sees which one was written and how."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.plain = torch.ones_like(weight, dtype=torch.float32, requires_grad=False)
        self.fetched = torch.ones_like(self.plain)
        self.weight = weight
        weight.main_grad = self.plain  # type: ignore[attr-defined]
        weight.__fsdp_param__ = True  # type: ignore[attr-defined]
        weight.get_main_grad = lambda: self.fetched  # type: ignore[attr-defined]
        weight.overwrite_main_grad = True  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def used_get_main_grad(self) -> bool:
        return not torch.equal(self.fetched, torch.ones_like(self.fetched))

    def overwrote(self) -> bool:
        """The input is ones and the output gradient ones, so the gradient is SIZE (rows) everywhere."""
        written = self.fetched if self.used_get_main_grad() else self.plain
        return torch.equal(written, torch.full_like(written, float(SIZE)))


def _run(module: nn.Module, device: torch.device, *extra: Any) -> None:
    x = torch.ones(SIZE, SIZE, device=device)
    module(x, *extra).backward(torch.ones(SIZE, SIZE, device=device))


def probe(device: torch.device | str) -> Capabilities:
    """Run small fp32 layers of the installed TE on `device` and report what they did (some milliseconds)."""
    te = load_engine()
    device = torch.device(device)
    options = {
        "bias": False,
        "device": device,
        "params_dtype": torch.float32,
        "fuse_wgrad_accumulation": True,
    }
    linear = te.Linear(SIZE, SIZE, **options)
    buffers = _Buffers(linear.weight)
    _run(linear, device)
    grouped = te.GroupedLinear(1, SIZE, SIZE, **options)
    grouped_buffers = _Buffers(grouped.weight0)
    _run(grouped, device, [SIZE])
    overwrite_ops, returns_real = _probe_ops(te, device)
    return Capabilities(
        version=engine_version(),
        get_main_grad=buffers.used_get_main_grad(),
        overwrite_modules=buffers.overwrote(),
        overwrite_grouped=grouped_buffers.overwrote(),
        overwrite_ops=overwrite_ops,
        ops_return_real_wgrad=returns_real,
        dummy_wgrad=linear.weight.grad is not None,
        delayed_wgrad=hasattr(te.Linear, "register_wgrad_accumulation_and_reduce_hooks"),
    )


def _probe_ops(te: Any, device: torch.device) -> tuple[bool, bool]:
    """(honours the flag, returns the real gradient as well)."""
    linear = te.ops.BasicLinear(
        SIZE, SIZE, device=device, dtype=torch.float32, accumulate_into_main_grad=True
    )
    buffers = _Buffers(linear.weight)
    _run(linear, device)
    gradient = linear.weight.grad
    real = gradient is not None and torch.equal(gradient, torch.full_like(gradient, float(SIZE)))
    return buffers.overwrote(), real
