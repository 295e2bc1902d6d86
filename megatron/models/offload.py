"""Activations that wait for backward in host memory: --cpu-offloading-num-layers and --offload-modules.

What autograd keeps of a part of a layer is copied to pinned host memory as it is saved, and back as backward asks for
it. Weights, which are views of buffers that FSDP fills and empties, are kept as they are; so is what is small.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

ATTENTION_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
MLP_MODULES = ("mlp_norm", "expert_fc1", "moe_act")


@dataclass(frozen=True)
class OffloadConfig:
    """Attributes:
    num_layers: the first layers of the model, whole.
    modules: in all layers, the half of the layer (attention or mlp) that one of these is part of.
    minimum_bytes: smaller tensors stay.
    """

    num_layers: int = 0
    modules: tuple[str, ...] = ()
    minimum_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        known = (*ATTENTION_MODULES, *MLP_MODULES)
        for module in self.modules:
            if module not in known:
                raise ValueError(f"--offload-modules {module}: choose from {', '.join(known)}")
        if self.num_layers < 0:
            raise ValueError(f"--cpu-offloading-num-layers {self.num_layers}: give 0 or more")

    def covers(self, part: str, index: int) -> bool:
        """Whether `part` ("attention" or "mlp") of the layer with this index, from 0, goes to the host."""
        names = ATTENTION_MODULES if part == "attention" else MLP_MODULES
        return index < self.num_layers or any(name in names for name in self.modules)

    @classmethod
    def from_arguments(cls, arguments: Any) -> OffloadConfig:
        """What a namespace with Megatron's names describes."""
        fine = getattr(arguments, "fine_grained_activation_offloading", False)
        return cls(
            num_layers=getattr(arguments, "cpu_offloading_num_layers", 0),
            modules=tuple(getattr(arguments, "offload_modules", None) or ()) if fine else (),
            minimum_bytes=getattr(arguments, "min_offloaded_tensor_size", 1 << 20),
        )


def offloading(module: nn.Module, minimum_bytes: int) -> AbstractContextManager[Any]:
    """A context for the forward of `module`; nothing on a machine where device and host memory are one."""
    storages = set()
    for parameter in module.parameters():
        if parameter.device.type == "cpu":
            return nullcontext()
        storages.add(parameter.untyped_storage().data_ptr())
    return saved_tensors_hooks(*host_hooks(storages, minimum_bytes))


def host_hooks(kept: set[int], minimum_bytes: int) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """(pack, unpack) for saved_tensors_hooks. kept: addresses of storages whose tensors stay where they are."""

    def pack(tensor: Tensor) -> Any:
        small = tensor.numel() * tensor.element_size() < minimum_bytes
        if small or type(tensor) not in (Tensor, nn.Parameter) or tensor.untyped_storage().data_ptr() in kept:
            return tensor
        pinned = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=True)
        return tensor.device, host

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    return pack, unpack
