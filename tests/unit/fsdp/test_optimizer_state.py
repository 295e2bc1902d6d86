"""Optimizer state in and out of checkpoints, for optimizers that count and keep it in different ways."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fsdp import fully_shard
from megatron.fsdp.checkpoint import allocate_optimizer_state, finish_optimizer_load, optimizer_state

SHAPES = {
    "opt.a.step": (torch.Size(()), torch.float32),
    "opt.a.exp_avg": (torch.Size((6, 4)), torch.float32),
    "opt.a.scale": (torch.Size((2,)), torch.float32),
}


class Parameter:
    """Stands in for a sharded parameter on another device than this machine has."""

    def __init__(self) -> None:
        self.device = torch.device("meta")
        location = SimpleNamespace(name="a", global_shape=(6, 4))
        self._fsdp_managed = SimpleNamespace(
            sharded=self, info=SimpleNamespace(location=location, shape=(6, 4))
        )


@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_a_step_count_is_allocated_where_its_kernel_reads_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], device: str
) -> None:
    """As torch does at a first step: on the host, but for fused and capturable kernels. Other state on the device."""
    parameter = Parameter()
    optimizer: Any = torch.optim.AdamW.__new__(torch.optim.AdamW)
    optimizer.param_groups, optimizer.state = [{"params": [parameter], **options}], defaultdict(dict)
    recorded: list[Any] = []
    monkeypatch.setattr(torch, "zeros_like", lambda like, **_: recorded.append(like) or torch.zeros(3, 4))
    allocate_optimizer_state(optimizer, SHAPES, "opt.")
    state = optimizer.state[parameter]
    assert state["step"].device.type == device and state["step"].shape == ()
    assert state["scale"].device.type == "meta"
    assert recorded == [parameter]


class GroupStepAdam(torch.optim.Optimizer):
    """Adam's averages as Transformer Engine and apex keep them: plain parts of the rank, one count in the group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                local = parameter.to_local()
                state = self.state[parameter]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(local)
                state["exp_avg"].mul_(0.9).add_(parameter.grad.to_local())
                local.sub_(group["lr"] / group["step"] * state["exp_avg"])


@contextlib.contextmanager
def sharded_model(world: int = 2) -> Iterator[nn.Module]:
    """Rank 1's part of a small model."""
    dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
    try:
        torch.manual_seed(0)
        model = nn.Linear(4, 6)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        yield model
    finally:
        dist.destroy_process_group()


def set_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
        parameter.grad.to_local().fill_(1.0)  # type: ignore[attr-defined]


def test_counts_in_groups_go_through_a_checkpoint() -> None:
    """A count for each parameter in the checkpoint, one in the group after loading; parts carry their place."""
    with sharded_model() as model:
        optimizer = GroupStepAdam(model.parameters())
        for _ in range(3):
            set_gradients(model)
            optimizer.step()
        saved = optimizer_state(optimizer)
        shapes = {}
        for name, values in saved.items():
            assert set(values) == {"exp_avg", "step"} and values["step"].item() == 3.0
            info = values["exp_avg"].shard_info
            assert info.location.name == name and info.chunks()
            shapes[f"{name}.exp_avg"] = (torch.Size(info.location.global_shape), torch.float32)
            shapes[f"{name}.step"] = (torch.Size(()), torch.float32)
        again = GroupStepAdam(model.parameters())
        allocate_optimizer_state(again, shapes)
        for name, values in optimizer_state(again).items():
            for key, value in values.items():
                source = saved[name][key]
                getattr(value, "_local_tensor", value).copy_(getattr(source, "_local_tensor", source))
        finish_optimizer_load(again)
        assert [group["step"] for group in again.param_groups] == [3]
        for parameter in model.parameters():
            kept = again.state[parameter]["exp_avg"]
            assert type(kept) is torch.Tensor
            assert torch.equal(kept, optimizer.state[parameter]["exp_avg"])
        set_gradients(model)
        again.step()
        assert {values["step"].item() for values in optimizer_state(again).values()} == {4.0}


def test_torchs_own_optimizers_count_by_parameter() -> None:
    with sharded_model() as model:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        set_gradients(model)
        optimizer.step()
        for values in optimizer_state(optimizer).values():
            assert values["step"].item() == 1.0
        finish_optimizer_load(optimizer)
        assert "step" not in optimizer.param_groups[0]
