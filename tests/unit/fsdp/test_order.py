"""The order of launches is compared between ranks; pools of buffers; what a failed step leaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, data_parallel_placement, fully_shard
from megatron.fsdp.param_group import ParamGroup
from tests.pool import RankError, run_ranks
from tests.unit.fsdp.models import Block, relative
from tests.unit.fsdp.test_wrapper import make_mesh

HIDDEN = 8


class Stack(nn.Module):
    """Blocks that run in the order that is asked for."""

    def __init__(self, sizes: tuple[int, ...], recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block(HIDDEN, size) for size in sizes)
        self.recompute = recompute
        self.fail = ""

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for position, index in enumerate(order):
            if self.fail == "forward" and position == 1:
                raise KeyError("a failure in forward")
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if self.fail == "backward" and position == 1:
                x.register_hook(_fail)
        return x


def _fail(_gradient: torch.Tensor) -> None:
    raise KeyError("a failure in backward")


def wrap(model: nn.Module, world_size: int, **options: object) -> FullyShardedDataParallel:
    config = FSDPConfig(main_params_dtype=None, main_grads_dtype=torch.float64, **options)  # type: ignore[arg-type]
    return FullyShardedDataParallel(
        model, config, data_parallel_placement(make_mesh(world_size, 1)), (Block,)
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *args: object) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    model(x, *args).square().mean().backward()
    if isinstance(model, FullyShardedDataParallel):
        model.finish_grad_sync()
    optimizer.step()
    optimizer.zero_grad()


def swapped(rank, world_size, interval):
    """In the third step rank 1 runs two layers of equal sizes in another order."""
    model = wrap(Stack((9, 9, 9)).double(), world_size, order_check_interval=interval)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(4):
        step(model, optimizer, rank, (1, 0, 2) if rank == 1 and index == 2 else (0, 1, 2))


def test_a_rank_with_another_order_is_named():
    """Equal sizes: nothing else would notice. The error is every rank's and names rank and units.

    In forward both ranks gather blocks.0 ahead, in backward rank 1 wants it first.
    """
    message = "rank 1 launched the gather of blocks.0 where rank 0 launched the gather of blocks.1"
    with pytest.raises(RankError, match=message):
        run_ranks(swapped, 2, 2, timeout=30)


def pools(rank, world_size):
    """Weights, and the bytes of gathered buffers in the middle of a backward, with and without a pool."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        release = ParamGroup._release_storage

        def poisoned(group: ParamGroup) -> None:
            if group.gathered:
                group.compute.fill_(float("nan"))
            release(group)

        patch.setattr(ParamGroup, "_release_storage", poisoned)
        for count, recompute in ((0, False), (2, False), (3, False), (2, True)):
            model = wrap(Stack((9, 30, 12), recompute).double(), world_size, buffer_pool=count)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                step(model, optimizer, rank)
            step(model, optimizer, rank, (2, 1, 0))  # another order: gathers ahead find no room
            weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
            slots = {id(group.slot): group.slot for group in model.groups if group.slot is not None}
            sizes = [
                [group.compute_bytes for group in unit.groups] for unit in model.engine.units if unit.groups
            ]
            results.append((weights, sum(slot.storage.nbytes() for slot in slots.values()), sizes))
    return results


def test_a_pool_of_buffers():
    """Units of three sizes take turns: the same weights, released data poisoned, bytes as documented (F20)."""
    for results in run_ranks(pools, 2):
        truth, nothing, sizes = results[0]
        assert nothing == 0
        assert len({sum(each) for each in sizes}) == 3
        for (weights, held, _), count in zip(results[1:], (2, 3, 2), strict=True):
            turns = [sizes[turn::count] for turn in range(count)]
            assert held == sum(max(each) for turn in turns for each in zip(*turn, strict=True))
            for name, value in truth.items():
                assert torch.equal(weights[name], value), name


def too_small(rank, world_size, count):
    model = wrap(Stack((9, 9, 9)).double(), world_size, buffer_pool=count)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, (2, 0, 1))


@pytest.mark.parametrize(
    "count, message",
    [
        (1, "buffer_pool=1: a unit is gathered while another is used"),
        (2, "blocks.2.norm.weight needs the pool's buffer that blocks.0.norm.weight is using"),
    ],
)
def test_too_small_a_pool_is_an_error(count, message):
    """One set of buffers, or units that share one and run one after the other."""
    with pytest.raises(RankError, match=message):
        run_ranks(too_small, 2, count, timeout=30)


def failing(rank, world_size):
    """Weights after two good steps with failures in between, caught by the script."""
    found = {}
    for strategy in ("no_shard", "optim_grads_params"):
        model = Stack((9, 30, 12)).double()
        for block in model.blocks:
            fully_shard(block, strategy=strategy)
        fully_shard(model, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model, optimizer, rank)
        for model.fail in ("forward", "backward"):
            with pytest.raises(KeyError, match=f"a failure in {model.fail}"):
                step(model, optimizer, rank)
            optimizer.zero_grad()
        model.fail = ""
        step(model, optimizer, rank)
        found[strategy] = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return found


def test_a_failed_step_leaves_nothing_behind():
    """An exception in forward or backward is itself, no hang; the next step is right."""
    model = Stack((9, 30, 12)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for rank in range(2):
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(3, HIDDEN, generator=generator, dtype=torch.float64)
            (model(x).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(failing, 2, timeout=30):
        for strategy, weights in found.items():
            for name, parameter in model.named_parameters():
                assert relative(weights[name], parameter.detach()) < 1e-12, f"{strategy}: {name}"
