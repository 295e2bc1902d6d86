"""Modules that FSDP implementations stumble over, each against single-process autograd under every strategy."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import ShardingStrategy, fully_shard, register_fsdp_forward_method
from tests.pool import run_ranks
from tests.unit.fsdp.models import Block, FusedLinear, relative

WIDTH, STEPS, MICROBATCHES = 6, 3, 2


class Plain(nn.Module):
    """Three layers; the base of most cases. `call(i, layer, x)` may be overridden."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, 9, linear) for _ in range(3))

    def call(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def forward(self, x: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.call(index, layer, x)
        return x


class Fused(Plain):
    def __init__(self) -> None:
        super().__init__(FusedLinear)


class CalledTwice(Fused):
    """A layer used twice in one forward, once more without gradients (G17, P12)."""

    def call(self, index, layer, x):
        with torch.no_grad():
            layer(x)
        return layer(layer(x))


class Recompute(Fused):
    def call(self, index, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class ReentrantRecompute(Fused):
    def call(self, index, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


class ReentrantTwice(Fused):
    def call(self, index, layer, x):
        return checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)


class ChunkRecompute(Fused):
    """One checkpoint over all layers: the recomputed forward runs over units that are not gathered (F01)."""

    def forward(self, x, rank=0, step=0):
        return checkpoint(lambda y: super(ChunkRecompute, self).forward(y), x, use_reentrant=False)


class InPlace(nn.Module):
    """In-place activations, and outputs changed in place by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            y = layer(x)
            y.mul_(2.0).add_(x)
            x = y
        return x


class ManyOutputs(nn.Module):
    """Tuples, dicts, views and unused outputs; keyword arguments."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, *, scale=None):
            left, right = self.a(x).chunk(2, -1)
            return {"left": left, "pair": (right * scale, self.b(x))}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            out = layer(x, scale=torch.tensor(0.5, dtype=x.dtype))
            x = x + out["left"] + out["pair"][0].tanh()
        return x


class UnusedOnSomeRanks(nn.Module):
    """A branch inside a unit that only rank 0 uses, one that even steps use, one that nobody uses (F06)."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rank0 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.even, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, rank, step):
            x = self.always(x)
            if rank == 0:
                x = x + self.rank0(x)
            return x + self.even(x) if step % 2 == 0 else x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            x = layer(x, rank, step)
        return x


class OnlyOnRank0(nn.Module):
    """Only rank 0 uses a branch: its units are final at other times than the other ranks'."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rank0 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, rank):
            return self.always(x) + (self.rank0(x) if rank == 0 else 0)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            x = layer(x, rank)
        return x


class Frozen(Fused):
    """A frozen layer under a trainable one, frozen parameters beside trainable ones (F02, F03, F05)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[0].norm.requires_grad_(False)
        self.layers[2].fc1.weight.requires_grad_(False)


class FrozenRecompute(Frozen):
    def call(self, index, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class UnfreezeLater(Frozen):
    """Frozen in step 0, trained from step 1 on (F04)."""


class TiedAcross(nn.Module):
    """One weight in two units and twice in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH, WIDTH, FusedLinear) for _ in range(3))
        self.layers[2].fc1.weight = self.layers[0].fc1.weight
        self.layers[1].fc2.weight = self.layers[1].fc1.weight

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            x = layer(x)
        return x


class OddShapes(nn.Module):
    """Parameters of 0, 1 and 3 elements and of no dim at all; a rank may hold nothing (F13, F14)."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.one, self.three = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))
            self.tall, self.empty = nn.Parameter(torch.ones(5, 1)), nn.Parameter(torch.ones(0, WIDTH))
            self.cube = nn.Parameter(torch.ones(2, 3, WIDTH) / 7)

        def forward(self, x):
            y = x * self.scale + self.one * self.three.sum() + self.tall.mean() + self.empty.sum()
            return y + (y.unsqueeze(-2) * self.cube[0]).sum(-2) + self.cube[1, 2]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class OtherMethod(nn.Module):
    """A unit used through a method that is registered as a forward (F09)."""

    class Layer(Block):
        def encode(self, x):
            return Block.forward(self, x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, 9) for _ in range(3))

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            x = layer.encode(x)
        return x


class SharedContext(nn.Module):
    """Every unit takes one further input whose gradient is complete only at the end."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, context):
            return x + self.x(x).tanh() * self.c(context)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x, rank=0, step=0):
        context = self.stem(x)
        for layer in self.layers:
            x = layer(x, context)
        return x


class Nested(nn.Module):
    """Units inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Block(WIDTH, 9), Block(WIDTH, 9, FusedLinear)) for _ in range(2)
        )

    def forward(self, x, rank=0, step=0):
        for layer in self.layers:
            x = layer(x)
        return x


class OrderChanges(Plain):
    """Layers run in another order in odd steps, and one is skipped."""

    def forward(self, x, rank=0, step=0):
        order = [0, 1, 2] if step % 2 == 0 else [2, 0]
        for index in order:
            x = self.layers[index](x)
        return x


CASES: list[type[nn.Module]] = [
    Plain, Fused, CalledTwice, Recompute, ReentrantRecompute, ReentrantTwice, ChunkRecompute, InPlace, ManyOutputs,
    UnusedOnSomeRanks, OnlyOnRank0, Frozen, FrozenRecompute, UnfreezeLater, TiedAcross, OddShapes, OtherMethod,
    SharedContext, Nested, OrderChanges,
]  # fmt: skip


def make(case: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    model = case().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def data(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def unfreeze(case: type[nn.Module], model: nn.Module, step: int) -> None:
    if case is UnfreezeLater and step == 1:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


def new_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def truth_of(case: type[nn.Module], world_size: int) -> dict[str, Tensor]:
    model = copy.deepcopy(make(case))
    optim = new_optimizer(model.parameters())
    for step in range(STEPS):
        unfreeze(case, model, step)
        for microbatch in range(MICROBATCHES):
            for rank in range(world_size):
                x = data(step, microbatch, rank).requires_grad_()
                (model(x, rank, step).square().mean() / world_size).backward()
        for parameter in model.parameters():  # FSDP gives zeros to what no rank used, as Megatron's DDP does
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optim.step()
        optim.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def shard(case: type[nn.Module], model: nn.Module, strategy: str) -> None:
    for layer in model.layers:
        if case is Nested:
            for inner in layer:
                fully_shard(inner, strategy=strategy)
        fully_shard(layer, strategy=strategy)
        if case is OtherMethod:
            register_fsdp_forward_method(layer, "encode")
    fully_shard(model, strategy=strategy)


def run_case(rank: int, world_size: int, case: type[nn.Module], strategy: str):
    model = make(case)
    shard(case, model, strategy)
    optim = new_optimizer(model.parameters())
    for step in range(STEPS):
        unfreeze(case, model, step)
        for microbatch in range(MICROBATCHES):
            x = data(step, microbatch, rank).requires_grad_()
            model(x, rank, step).square().mean().backward()
            with torch.no_grad():  # an evaluation between microbatches changes nothing
                model(x.detach(), rank, step)
        optim.step()
        optim.zero_grad()
    gathered = [
        group.name
        for module in model.modules()
        for group in (module._fsdp_unit.groups if hasattr(module, "_fsdp_unit") else ())
        if group.placements.parameters_released and group.gathered and module is not model
    ]
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}, gathered


def run_all(rank: int, world_size: int, cases: list[type[nn.Module]], strategies: list[str]):
    return {
        (case, strategy): run_case(rank, world_size, case, strategy)
        for case in cases
        for strategy in strategies
    }


OTHERS = ("no_shard", "optim", "optim_grads")


def grid() -> list:
    """Every case under ZeRO-3 and another strategy in turn on 3 ranks; with --full under all, on 2 and 3."""
    cells: list = [
        pytest.param(case, 3, ["optim_grads_params", OTHERS[index % 3]], id=case.__name__)
        for index, case in enumerate(CASES)
    ]
    for case, world_size in itertools.product(CASES, (2, 3)):
        name = f"{case.__name__}-{world_size}-all"
        strategies = [strategy.value for strategy in ShardingStrategy]
        cells.append(pytest.param(case, world_size, strategies, marks=pytest.mark.full, id=name))
    return cells


@pytest.mark.parametrize("case, world_size, strategies", grid())
def test_awkward_module(case: Callable, world_size: int, strategies: list[str]) -> None:
    """Weights after three steps of two microbatches equal one process; nothing stays gathered but the root (G11, G15).

    Between the two there is a forward without gradients.
    """
    truth = truth_of(case, world_size)
    for results in run_ranks(run_all, world_size, [case], strategies, timeout=60):
        for (_, strategy), (weights, gathered) in results.items():
            for name, weight in truth.items():
                error = relative(weights[name], weight)
                assert error < 1e-12, f"{strategy}: {name} is off by {error:.1e}"
            assert not gathered, f"{strategy}: still gathered: {gathered}"


ONCE = [Plain, CalledTwice, ReentrantTwice, ChunkRecompute, SharedContext]


def passes(rank: int, world_size: int):
    """Number of reductions of each unit in one backward, by case."""
    return [reductions_of(rank, case) for case in ONCE]


def reductions_of(rank: int, case: type[nn.Module]) -> list[str]:
    model = make(case)
    shard(case, model, "optim_grads_params")
    model(data(0, 0, rank).requires_grad_())
    engine = model._fsdp_unit.engine
    engine.streams.log.enabled = True
    model(data(0, 0, rank).requires_grad_()).square().mean().backward()
    dist.barrier()
    return [name for event, name in engine.streams.log.events if event == "reduce"]


def test_reduced_exactly_once() -> None:
    """Each unit is reduced once per microbatch, however often it is used (G24)."""
    for by_case in run_ranks(passes, 2):
        for case, names in zip(ONCE, by_case, strict=True):
            assert len(names) == len(set(names)), f"{case.__name__}: {names}"
            assert {"layers.0", "layers.1", "layers.2"} <= set(names)
