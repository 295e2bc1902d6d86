"""Layout-invariant initialisation: every layout of a model starts from the same bits.

A tensor is drawn in fixed blocks of rows. A block's size follows from the tensor's global row length alone,
and its generator is seeded by (seed, global name, block index). So a rank draws only the blocks that touch
what it keeps, and whatever cuts the tensor (FSDP rows, tensor-parallel rows or columns, pipeline stages,
experts) gets the same values.

Draws are made in fp32 on the CPU and cast, whatever the parameter's device and dtype: the weights of a bf16
GPU run are the rounded weights of an fp32 CPU run. Padding rows (``ParameterAnnotation.num_global_rows``) are
zero and take no part in the blocks, so that the padding of a vocabulary does not change its real rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from megatron.parallel.annotate import Chunk, annotation_of, global_shape, local_chunks

if TYPE_CHECKING:
    from megatron.parallel.mesh import ParallelMesh

BLOCK_ELEMENTS = 1 << 16
"""Elements in a block (at least one row). Part of the definition of the initial weights: never change it."""


@dataclass(frozen=True)
class InitSpec:
    """How a parameter starts; the attribute ``init_spec`` of every parameter of our models.

    "normal" and "uniform" are symmetric around zero and have the standard deviation `std`.
    """

    kind: Literal["normal", "uniform", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class GlobalTensor:
    """One tensor of the whole model: what is needed to draw any part of it, anywhere."""

    name: str
    shape: tuple[int, ...]
    spec: InitSpec
    seed: int


def rows_per_block(row_elements: int) -> int:
    """Rows in a block of a tensor whose rows have this many elements."""
    return max(1, BLOCK_ELEMENTS // max(1, row_elements))


def draw_rows(tensor: GlobalTensor, row_start: int, row_end: int) -> Tensor:
    """Rows [row_start, row_end) of the initial value of `tensor`: fp32 on CPU, [rows, *tensor.shape[1:]].

    A scalar is drawn as a tensor of shape [1].
    """
    shape = tensor.shape or (1,)
    assert 0 <= row_start <= row_end <= shape[0], f"rows {row_start}:{row_end} of {tensor.name} {shape}"
    out = torch.zeros(row_end - row_start, *shape[1:], dtype=torch.float32, device="cpu")
    if tensor.spec.kind == "zeros":
        return out
    if tensor.spec.kind == "ones":
        return out.fill_(1.0)
    block = rows_per_block(math.prod(shape[1:]))
    for index in range(row_start // block, -(-row_end // block)):
        start = index * block
        values = _draw_block(tensor, start, min(start + block, shape[0]))
        first, last = max(row_start, start), min(row_end, start + block)
        out[first - row_start : last - row_start] = values[first - start : last - start]
    return out


def _draw_block(tensor: GlobalTensor, start: int, stop: int) -> Tensor:
    row_shape = tensor.shape[1:]
    index = start // rows_per_block(math.prod(row_shape))
    digest = hashlib.blake2b(f"{tensor.seed}/{tensor.name}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest, "little"))
    values = torch.empty(stop - start, *row_shape, dtype=torch.float32, device="cpu")
    std = tensor.spec.std
    if tensor.spec.kind == "normal":
        return values.normal_(0.0, std, generator=generator)
    if tensor.spec.kind == "uniform":
        bound = math.sqrt(3.0) * std
        return values.uniform_(-bound, bound, generator=generator)
    raise ValueError(
        f"InitSpec.kind {tensor.spec.kind!r} of {tensor.name}: use normal, uniform, zeros or ones"
    )


def fill_local(out: Tensor, tensor: GlobalTensor, chunks: Iterable[Chunk], row_start: int) -> None:
    """Fill `out`, rows [row_start, row_start + len(out)) of a tensor-parallel-local tensor, with its initial
    value.

    out: [rows, *local_shape[1:]] (a scalar parameter may come as shape [] or [1]), any dtype and device.
    chunks: where the local tensor's pieces lie in the global one (`megatron.parallel.annotate.local_chunks`).
    """
    with torch.no_grad():
        if out.dim() == 0:
            out = out.view(1)
        out.zero_()  # what no chunk covers is padding
        for chunk in chunks:
            local_rows = _rows(chunk.local_offsets, chunk.sizes)
            first, last = max(row_start, local_rows[0]), min(row_start + out.shape[0], local_rows[1])
            if first >= last:
                continue
            shift = (chunk.global_offsets[0] if chunk.global_offsets else 0) - local_rows[0]
            target = out[first - row_start : last - row_start]
            for dim in range(1, out.dim()):
                target = target.narrow(dim, chunk.local_offsets[dim], chunk.sizes[dim])
            _fill_box(target, tensor, chunk, first + shift)


def _fill_box(target: Tensor, tensor: GlobalTensor, chunk: Chunk, global_row: int) -> None:
    """Draw some blocks at a time, so that the fp32 copy of a huge tensor never exists whole."""
    step = 16 * rows_per_block(math.prod(tensor.shape[1:]))
    start, stop = global_row, global_row + target.shape[0]
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        values = draw_rows(tensor, start, end)
        for dim in range(1, values.dim()):
            values = values.narrow(dim, chunk.global_offsets[dim], chunk.sizes[dim])
        target[start - global_row : end - global_row].copy_(values)
        start = end


def _rows(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    return (offsets[0], offsets[0] + sizes[0]) if offsets else (0, 1)


@dataclass(frozen=True)
class Initializer:
    """The callback that gives FSDP (or `materialise`) the initial value of any rows of any parameter.

    global_name: turns a local parameter name into the name in the whole model (experts are numbered locally).
    """

    seed: int
    mesh: ParallelMesh
    global_name: Callable[[str, Tensor], str] = lambda name, parameter: name

    def __call__(self, name: str, parameter: Tensor, rows: slice, out: Tensor) -> None:
        """Write rows `rows` of the tensor-parallel-local parameter `name` into `out` ([rows, ...])."""
        spec = getattr(parameter, "init_spec", None)
        assert isinstance(spec, InitSpec), f"parameter {name} carries no init_spec"
        annotation = annotation_of(parameter)
        rank, size = self.mesh.rank(annotation.tensor_axis), self.mesh.size(annotation.tensor_axis)
        local_shape = tuple(parameter.shape)
        tensor = GlobalTensor(
            name=self.global_name(name, parameter),
            shape=tuple(global_shape(annotation, local_shape, size)),
            spec=spec,
            seed=self.seed,
        )
        fill_local(out, tensor, local_chunks(annotation, local_shape, rank, size), rows.start or 0)


def materialise(module: nn.Module, initializer: Initializer, device: torch.device | str = "cpu") -> nn.Module:
    """Give every parameter of `module` real storage on `device` and its initial value, in place; returns
    `module`.

    For models that are not wrapped by FSDP. Tied parameters stay tied, and parameter attributes are kept. A
    module with buffers must have a method `reset_buffers(device)` that makes them afresh: an emptied buffer
    is garbage.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        real = parameter
        if parameter.device != torch.device(device):
            value = torch.empty_like(parameter, device=device, requires_grad=False)
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            real.__dict__.update(parameter.__dict__)
        rows = parameter.shape[0] if parameter.dim() else 1
        initializer(name, parameter, slice(0, rows), real.detach())
        replaced[parameter] = real
    for child in module.modules():
        for key, own in list(child._parameters.items()):
            if own is not None:
                child._parameters[key] = replaced[own]
        if next(child.buffers(recurse=False), None) is not None:
            assert hasattr(child, "reset_buffers"), (
                f"{type(child).__name__} has buffers but no reset_buffers(device)"
            )
            child.reset_buffers(device)  # type: ignore[operator]
    return module
