"""Small models and the single-process oracle that FSDP's tests compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FusedLinearFunction(torch.autograd.Function):
    """Linear whose backward writes the weight gradient by the main_grad contract, as TE's modules do."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.overwrite = getattr(weight, "overwrite_main_grad", False)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad2, x2 = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (grad2 @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            param = ctx.weight
            buffer = param.get_main_grad() if hasattr(param, "__fsdp_param__") else param.main_grad
            wgrad = (grad2.t() @ x2).to(buffer.dtype)
            if ctx.overwrite:
                buffer.copy_(wgrad)
            else:
                buffer.add_(wgrad)
        return dx, None, grad2.sum(0) if ctx.needs_input_grad[2] else None


class FusedLinear(nn.Linear):
    """nn.Linear with fused wgrad where its weight takes part in the contract, else plain."""

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.weight, "__fsdp_param__"):
            return FusedLinearFunction.apply(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Pre-norm MLP block: norm, fc1, activation, fc2, residual."""

    def __init__(self, hidden: int, ffn: int, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.fc1 = linear(hidden, ffn)
        self.fc2 = nn.Linear(ffn, hidden) if linear is nn.Linear else linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, head; optionally a tied head."""

    def __init__(
        self,
        vocab: int = 13,
        hidden: int = 10,
        ffn: int = 18,
        layers: int = 3,
        linear: type[nn.Linear] = nn.Linear,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, ffn, linear) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean next-token loss of [batch, sequence] tokens."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


@dataclass
class Trace:
    """What a run did: loss and norm per step, gradients of the last step by name, weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def tokens_for(
    step: int, microbatch: int, rank: int, vocab: int = 13, batch: int = 2, length: int = 7
) -> Tensor:
    """The tokens of one rank's microbatch; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(vocab, (batch, length), generator=generator)


def oracle(
    build: Callable[[], nn.Module],
    world_size: int,
    microbatches: int,
    steps: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype = torch.float64,
) -> Trace:
    """Train on one process over the data of all ranks with plain autograd."""
    model = copy.deepcopy(build()).to(dtype)
    optim = optimizer(model.parameters())
    trace = Trace()
    for step in range(steps):
        optim.zero_grad()
        total = 0.0
        for microbatch in range(microbatches):
            for rank in range(world_size):
                loss = loss_of(model, tokens_for(step, microbatch, rank)) / (microbatches * world_size)
                loss.backward()
                total += loss.item()
        trace.losses.append(total)
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        trace.norms.append(
            torch.stack([grad.norm() for grad in grads.values() if grad is not None]).norm().item()
        )
        trace.gradients = {name: grad.clone() for name, grad in grads.items() if grad is not None}
        optim.step()
    trace.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return trace


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||."""
    scale = b.double().norm().item()
    return (a.double() - b.double()).norm().item() / (scale or 1.0)


def assert_same(trace: Trace, truth: Trace, tolerance: float) -> None:
    """Compare two traces by the project's metric."""
    assert trace.gradients.keys() == truth.gradients.keys()
    for name, truth_grad in truth.gradients.items():
        error = relative(trace.gradients[name], truth_grad)
        assert error <= tolerance, f"gradient of {name}: off by {error:.2e}"
    for a, b in zip(trace.losses + trace.norms, truth.losses + truth.norms, strict=True):
        assert abs(a - b) <= tolerance * abs(b), (
            f"losses and norms {trace.losses + trace.norms} != {truth.losses}"
        )
    for name, weight in truth.weights.items():
        error = relative(trace.weights[name], weight)
        assert error <= tolerance, f"weight {name}: off by {error:.2e}"
