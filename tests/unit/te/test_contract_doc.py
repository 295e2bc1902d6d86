"""The custom layer of docs/main_grad_contract.md, as printed there, joins FSDP."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from tests.pool import REPOSITORY_ROOT, run_ranks

WIDTH, MICROBATCHES = 6, 3


def documented_layer() -> type[nn.Module]:
    """A module around the autograd function in the document."""
    text = (REPOSITORY_ROOT / "docs/main_grad_contract.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    names: dict = {"torch": torch}
    exec(code.group(1), names)
    function = names["FusedLinear"]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: Tensor) -> Tensor:
            return function.apply(x, self.weight)

    return Layer


def inputs(microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch + 10 * rank)
    return torch.randn(4, WIDTH, generator=generator) * 10.0**microbatch


def train(rank: int, world_size: int, strategy: str) -> Tensor:
    """The reduced gradient of a weight that is used twice per microbatch."""
    from torch.distributed.device_mesh import init_device_mesh

    from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy, data_parallel_placement

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    layer = documented_layer()()
    model = nn.Sequential(layer, nn.Tanh(), layer)
    config = FSDPConfig(strategy=ShardingStrategy(strategy))
    wrapped = FullyShardedDataParallel(model, config, data_parallel_placement(mesh), ())
    for microbatch in range(MICROBATCHES - 1):
        with wrapped.no_sync():
            wrapped(inputs(microbatch, rank).requires_grad_()).square().sum().backward()
    wrapped(inputs(MICROBATCHES - 1, rank).requires_grad_()).square().sum().backward()
    wrapped.finish_grad_sync()
    return next(wrapped.parameters()).grad.full_tensor()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_the_documented_layer_joins_fsdp(strategy: str) -> None:
    weight = documented_layer()().weight.detach().requires_grad_()
    for rank in range(2):
        for microbatch in range(MICROBATCHES):
            hidden = torch.tanh(inputs(microbatch, rank) @ weight.t())
            ((hidden @ weight.t()).square().sum() / 2).backward()
    for gradient in run_ranks(train, 2, strategy):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-5, atol=1e-5)
