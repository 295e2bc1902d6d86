"""What Transformer Engine's modules see as `torch`: factories that put CUDA tensors on CPU, and a pretended
GPU.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
)

CUDA_VERSION = "12.8"
"""What torch.version.cuda pretends to be; TE wants 12.9 for FP8 in blocks."""


def on_cpu(device: Any) -> Any:
    """`device`, or the CPU where it is a CUDA device (an index, a string, a torch.device)."""
    is_cuda = (
        (isinstance(device, int) and not isinstance(device, bool))
        or (isinstance(device, torch.device) and device.type == "cuda")
        or (isinstance(device, str) and device.startswith("cuda"))
    )
    return torch.device("cpu") if is_cuda else device


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _Stream:
    cuda_stream = 0
    wait_stream = wait_event = synchronize = record_event = staticmethod(_nothing)


class CudaModule(types.ModuleType):
    """torch.cuda with one device of the given compute capability; its random state is the CPU's."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__("torch.cuda")
        major, minor = capability
        properties = types.SimpleNamespace(
            major=major, minor=minor, multi_processor_count=132, name="CPU emulator", total_memory=1 << 34
        )
        self.is_available = self.is_initialized = _constant(True)
        self.current_device, self.device_count = _constant(0), _constant(1)
        self.get_device_properties = _constant(properties)
        self.get_device_capability = _constant(capability)
        self.current_stream = self.default_stream = _constant(_Stream())
        self.is_current_stream_capturing = _constant(False)
        self.get_rng_state = lambda *device: torch.get_rng_state()
        self.set_rng_state = lambda state, *device: torch.set_rng_state(state)
        self.manual_seed = torch.manual_seed
        self.synchronize = self.empty_cache = self.set_device = _nothing
        self.stream = self.device = lambda *args: contextlib.nullcontext()
        self.nvtx = types.SimpleNamespace(
            range_push=_nothing, range_pop=_nothing, range=lambda *args: contextlib.nullcontext()
        )
        self.default_generators = [torch.default_generator]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchModule(types.ModuleType):
    """torch, but for `cuda`, its version and the factory functions."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__("torch")
        self.cuda = CudaModule(capability)
        self.version = types.SimpleNamespace(**{**vars(torch.version), "cuda": CUDA_VERSION})
        for name in FACTORIES:
            setattr(self, name, _factory(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _factory(real: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return real(*args, **kwargs)

    return create


def rebind(proxy: TorchModule) -> None:
    """Point the global `torch` of every loaded module of Transformer Engine to the proxy. Idempotent."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and getattr(module, "__dict__", {}).get("torch") is torch:
            module.__dict__["torch"] = proxy


def _called_by_te() -> bool:
    """Whether the caller of our caller is code of Transformer Engine."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformer_engine.")


def patch_tensor_methods() -> None:
    """Tensor.is_cuda, .cuda and .to answer TE's code as if the tensor were on a GPU, and everybody else
    truly.
    """
    base: Any = torch._C.TensorBase
    real_is_cuda, real_cuda, real_to = base.is_cuda, base.cuda, base.to

    def is_cuda(self: torch.Tensor) -> bool:
        return True if _called_by_te() else real_is_cuda.__get__(self)

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_te() else real_cuda(self, *args, **kwargs)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _called_by_te():
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            args = tuple(on_cpu(a) if isinstance(a, (torch.device, str)) else a for a in args)
        return real_to(self, *args, **kwargs)

    tensor: Any = torch.Tensor
    tensor.is_cuda, tensor.cuda, tensor.to = property(is_cuda), cuda, to
