"""Small models of TE layers, 8 features wide, that use weights in every way that the main_grad contract must
bear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.te.engine import device, load

WIDTH = 8
ROWS = 4
Options = dict[str, Any]


def layer_options(fused: bool, delayed: bool, dtype: torch.dtype = torch.float32) -> Options:
    """Constructor arguments of TE's layers."""
    options: Options = {"device": device(), "params_dtype": dtype, "fuse_wgrad_accumulation": fused}
    if delayed:
        options["delay_wgrad_compute"] = True
    return options


def linear(options: Options, **more: Any) -> Any:
    """te.Linear."""
    return load().Linear(WIDTH, WIDTH, **(options | more))


def basic_linear(options: Options) -> Any:
    """te.ops.BasicLinear, fused or not as the options say."""
    fused, dtype = options["fuse_wgrad_accumulation"], options["params_dtype"]
    return load().ops.BasicLinear(WIDTH, WIDTH, device=device(), dtype=dtype, accumulate_into_main_grad=fused)


def without_delay(options: Options) -> Options:
    """The same, but for delayed wgrad."""
    return {key: value for key, value in options.items() if key != "delay_wgrad_compute"}


class One(nn.Module):
    """A layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.a = linear(options)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.a(x, **call)


class Twice(nn.Module):
    """A layer before and after another one."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.a = linear(options)
        self.b = load().LayerNormLinear(WIDTH, WIDTH, **options)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.a(self.b(self.a(x, **call), **call).tanh(), **call)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.a = linear(options, bias=False)
        self.b = linear(options, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.b(self.a(x, **call).tanh(), **call)


class TiedEmbedding(nn.Module):
    """A head with the embedding's weight: autograd and the layer both give it a gradient."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, device=device(), dtype=options["params_dtype"])
        self.head = linear(options, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        tokens = (x[:, 0] * 2).long().abs() % WIDTH
        return self.head(self.embedding(tokens).tanh() * x, **call)


class AutogradFirst(nn.Module):
    """The weight is used by plain autograd after the layer: its gradient comes first in backward."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.head = linear(options, bias=False)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.head(x, **call) @ self.head.weight


class FusedAndUnfusedTied(nn.Module):
    """One weight in a fused and in an unfused layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.a = linear(options, bias=False)
        self.b = linear(options | {"fuse_wgrad_accumulation": False}, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.b(self.a(x, **call).tanh(), **call)


class MlpTwice(nn.Module):
    """LayerNormMLP, a layer, the same LayerNormMLP."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        kinds = {"activation": "swiglu", "normalization": "RMSNorm"}
        self.mlp = load().LayerNormMLP(WIDTH, 4 * WIDTH, **kinds, **options)
        self.linear = linear(options)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.mlp(self.linear(self.mlp(x, **call), **call).tanh(), **call)


class MlpHalfFrozen(nn.Module):
    """LayerNormMLP with one frozen weight, and a frozen layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.mlp = load().LayerNormMLP(WIDTH, 4 * WIDTH, **options)
        self.linear = linear(options)
        self.mlp.fc1_weight.requires_grad_(False)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.linear(self.mlp(x, **call).tanh(), **call)


class Experts(nn.Module):
    """Three experts, one of them idle."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.experts = load().GroupedLinear(3, WIDTH, WIDTH, **options)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.experts(x, [3, 1, 0], **call)


class ExpertsTwice(Experts):
    """The same experts with other tokens."""

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.experts(self.experts(x, [3, 1, 0], **call).tanh(), [0, 3, 1], **call)


class ExpertTied(Experts):
    """One expert's weight is a layer's as well."""

    index = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.linear = linear(options, bias=False)
        self.linear.weight = getattr(self.experts, f"weight{self.index}")

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.linear(super().forward(x, **call).tanh(), **call)


class OtherExpertTied(ExpertTied):
    """Not the expert that TE asks for all of them."""

    index = 1


class Operations(nn.Module):
    """te.ops and a module."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.operation = basic_linear(options)
        self.b = linear(without_delay(options))

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.b(self.operation(x).tanh(), **call)


class OperationTwice(Operations):
    """te.ops used twice."""

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.operation(self.b(self.operation(x).tanh(), **call))


class OperationTied(nn.Module):
    """te.ops and a module with one weight."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.operation = basic_linear(options)
        self.b = linear(options, bias=False)
        self.b.weight = self.operation.weight

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.b(self.operation(x).tanh(), **call)


class Unused(nn.Module):
    """A layer that nobody calls."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.a = linear(options)
        self.never = linear(options)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        return self.a(x, **call)


class Sometimes(nn.Module):
    """A layer that some microbatches, and some ranks, call."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.a = linear(options)
        self.sometimes = linear(options)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        y = self.a(x, **call)
        return self.sometimes(y, **call) if x[0, 0] > 0 else y


MODELS: dict[str, Callable[[Options], nn.Module]] = {
    "one": One,
    "twice": Twice,
    "tied": Tied,
    "tied-embedding": TiedEmbedding,
    "autograd-first": AutogradFirst,
    "fused-and-unfused": FusedAndUnfusedTied,
    "mlp-twice": MlpTwice,
    "mlp-half-frozen": MlpHalfFrozen,
    "experts": Experts,
    "experts-twice": ExpertsTwice,
    "expert-0-tied": ExpertTied,
    "expert-1-tied": OtherExpertTied,
    "operation": Operations,
    "operation-twice": OperationTwice,
    "operation-tied": OperationTied,
    "unused": Unused,
    "sometimes": Sometimes,
}

NEVER_DELAYED = ("mlp-half-frozen",)
"""TE's LayerNormMLP.backward_dw() fails with a frozen weight (test_contract_facts.py)."""


def microbatch(index: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Input of a microbatch: inputs grow by ten, so a lost, doubled or stale term shows."""
    generator = torch.Generator().manual_seed(index + 100 * rank)
    return (torch.randn(ROWS, WIDTH, generator=generator) * 10.0**index).to(dtype).to(device())


def loss_of(output: Tensor) -> Tensor:
    """A scalar of moderate size."""
    return output.float().square().mean() * 1e-2


RECOMPUTES = ("none", "torch", "torch-reentrant", "te", "te-reentrant")


def call(model: nn.Module, x: Tensor, recompute: str, **options: Any) -> Tensor:
    """model(x), its activations recomputed in backward as `recompute` says."""
    x = x.clone().requires_grad_()
    if recompute == "none":
        return model(x, **options)
    checkpoint = load().checkpoint if recompute.startswith("te") else torch.utils.checkpoint.checkpoint

    def run(x: Tensor) -> Tensor:
        return model(x, **options)

    return checkpoint(run, x, use_reentrant=recompute.endswith("reentrant"))


def delayed_layers(model: nn.Module) -> list[Any]:
    """The layers whose backward_dw() must be called."""
    found = []
    for module in model.modules():
        store = getattr(module, "wgrad_store", None)
        if store is not None and store.delay_wgrad_compute():
            found.append(module)
    return found


def run_delayed(layer: Any) -> int:
    """backward_dw() for every backward of `layer` that waits; how many there were."""
    runs = 0
    while layer.wgrad_store.context is not None and layer.wgrad_store.context.qsize():
        layer.backward_dw()
        runs += 1
    return runs
