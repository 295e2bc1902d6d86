"""FSDP over a fake group of 1024 ranks under fake tensors: a planner runs the real code that way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fsdp import FSDPConfig, FullyShardedDataParallel, ShardingStrategy, data_parallel_placement
from tests.unit.fsdp.test_cost import storages
from tests.unit.fsdp.test_wrapper import STRATEGIES

WORLD, HIDDEN, FFN, LAYERS = 1024, 4096, 8192, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
        self.up = nn.Linear(HIDDEN, FFN, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(FFN, HIDDEN, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


@pytest.fixture(autouse=True)
def many_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=1000, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_over_1024_ranks(strategy: str) -> None:
    """Wrap, train, count: the persistent bytes of a rank are the formula's, and the wire's follow from the sizes."""
    per_element = {  # bf16 compute, fp32 main and gradients, without AdamW's 8 bytes
        "no_shard": 10.0,
        "optim": 6 + 4 / WORLD,
        "optim_grads": 2 + 8 / WORLD,
        "optim_grads_params": 8 / WORLD,
    }[strategy]
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = FullyShardedDataParallel(
            nn.Sequential(*(Layer() for _ in range(LAYERS))),
            FSDPConfig(strategy=ShardingStrategy(strategy)),
            data_parallel_placement(mesh),
            (Layer,),
        )
        optimizer = torch.optim.AdamW(model.parameters())
        comms = model.groups[0].comms
        for _ in range(2):
            for comm in (comms.gather, comms.reduce):
                comm.traffic.clear()
            x = torch.empty(2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
            model(x).sum().backward()
            model.finish_grad_sync()
            optimizer.step()
        padded = sum(group.layout.numel for group in model.groups)
        local = sum(parameter._local_tensor.numel() for parameter in model.parameters())
        assert storages(model, optimizer) == per_element * padded + 8 * local
    share = (WORLD - 1) / WORLD
    reduced = comms.reduce.traffic["all_reduce" if strategy == "no_shard" else "reduce_scatter"].bytes
    assert reduced == (2 if strategy == "no_shard" else 1) * 4 * padded * share
