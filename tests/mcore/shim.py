"""Let megatron-core run on CPU and gloo by faking the torch.cuda surface. For worker processes of tests only.

Nothing in here changes arithmetic: every "cuda" device becomes "cpu", streams and events do nothing (overlap is
program order), and the layers of megatron-core that need no Transformer Engine get what they lack without it.
`install()` is called once in a process, before anything imports megatron.core.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_RealDevice = torch.device
_CPU = _RealDevice("cpu")
_FACTORIES = (
    "tensor as_tensor empty zeros ones full arange rand randn randint linspace eye tril_indices triu_indices "
    "empty_like zeros_like ones_like full_like rand_like randn_like randperm empty_strided scalar_tensor"
).split()
_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_TENSOR_TYPES = "Float BFloat16 Half Long Int Byte Bool Double".split()


def install() -> None:
    """Patch torch, then import megatron.core and fill its gaps."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch.cuda.nvtx
    import torch.distributed.tensor
    import torch.utils.checkpoint

    import megatron.fsdp  # noqa: F401  (these see torch as it is)

    torch.compile = lambda model=None, **_options: model or (lambda function: function)  # type: ignore[assignment]
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # the wheel without its extension
    _patch_devices()
    _patch_cuda()
    _patch_collectives()
    _patch_megatron_core()


def _on_cpu(device: Any) -> Any:
    """`device`, or the CPU if it is a CUDA device in any spelling."""
    if isinstance(device, _RealDevice):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if type(device) is int else device


class _DeviceType(type):
    """Makes `torch.device` a class that returns real devices, none of them CUDA."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RealDevice)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and _on_cpu(args[0]) is _CPU:
            return _CPU
        return _RealDevice(*args, **kwargs)


class _Device(metaclass=_DeviceType):
    pass


def _with_device(function: Callable[..., Any], positional: bool = False) -> Callable[..., Any]:
    """`function` with its device argument on the CPU; `positional`: it may be the first after self."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if positional and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        return function(*args, **kwargs)

    return call


def _patch_devices() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _with_device(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _with_device(getattr(torch.Tensor, name)))
    real_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """megatron-core asserts 'torch.cuda.FloatTensor'."""
        result = real_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.to = _with_device(tensor.to, positional=True)
    module.to = _with_device(module.to, positional=True)
    tensor.cuda = module.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    tensor.type = tensor_type
    torch.device = _Device  # type: ignore[misc, assignment]


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Stream(_Event):
    device = _CPU
    cuda_stream = 0

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, *args: Any) -> _Event:
        return _Event()


class _Generators(dict):
    def __getitem__(self, key: object) -> torch.Generator:
        return torch.default_generator


@contextlib.contextmanager
def _no_range(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _returning(value: Any) -> Callable[..., Any]:
    """A new function each time: torch's compiler, if it is imported, wants each of torch.cuda to be another."""
    return lambda *args, **kwargs: value


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    for name in ("set_device", "synchronize", "empty_cache", "set_stream", "_lazy_init"):
        setattr(cuda, name, _returning(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _returning(0))
    cuda.current_device = _returning(_CPU)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream, cuda.default_stream = _returning(stream), _returning(stream)
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    properties = types.SimpleNamespace(
        multi_processor_count=1, total_memory=1 << 34, major=9, minor=0, name="cpu"
    )
    cuda.get_device_properties = lambda *args: properties
    cuda.is_current_stream_capturing = lambda: False
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda.default_generators = _Generators()
    cuda.nvtx = types.SimpleNamespace(
        range_push=_returning(None), range_pop=_returning(None), range=_no_range
    )
    for name in ("range_push", "range_pop"):
        setattr(sys.modules["torch.cuda.nvtx"], name, _returning(None))
    for name in _TENSOR_TYPES:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _patch_collectives() -> None:
    real = dist.all_to_all_single

    def all_to_all_single(output: Any, *args: Any, **kwargs: Any) -> Any:
        """megatron-core hands tensors of sizes over here."""
        for name in ("output_split_sizes", "input_split_sizes"):
            if kwargs.get(name) is not None:
                kwargs[name] = [int(size) for size in kwargs[name]]
        return real(output, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def _patch_megatron_core() -> None:
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # a NameError without Transformer Engine in 0.16.1

    def new_norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> Any:
        """The torch norms refuse sequence parallelism; they need a mark on their parameters only."""
        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new_norm
