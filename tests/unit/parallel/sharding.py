"""Cut global tensors into tensor-parallel ones and back, by their annotations: for tests of many ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.parallel.annotate import ParameterAnnotation, annotation_of, global_shape, local_chunks


def cut(whole: Tensor, annotation: ParameterAnnotation, rank: int, size: int) -> Tensor:
    """This rank's tensor; padding rows are zero."""
    shape = list(whole.shape)
    dim = annotation.tensor_parallel_dim
    if annotation.num_global_rows is not None:
        raise NotImplementedError("give the padded tensor and an annotation without num_global_rows")
    if dim is not None:
        shape[dim] //= size
    out = torch.zeros(shape, dtype=whole.dtype)
    for chunk in local_chunks(annotation, shape, rank, size):
        there = tuple(slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True))
        here = tuple(slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
        out[here] = whole[there]
    return out


def join(pieces: list[Tensor], annotation: ParameterAnnotation) -> Tensor:
    """The global tensor of the ranks' pieces; NaN where no rank has anything."""
    size = len(pieces)
    out = torch.full(global_shape(annotation, pieces[0].shape, size), torch.nan, dtype=pieces[0].dtype)
    for rank, piece in enumerate(pieces):
        for chunk in local_chunks(annotation, piece.shape, rank, size):
            there = tuple(slice(o, o + n) for o, n in zip(chunk.global_offsets, chunk.sizes, strict=True))
            here = tuple(slice(o, o + n) for o, n in zip(chunk.local_offsets, chunk.sizes, strict=True))
            out[there] = piece[here]
    return out


def load_cut(module: nn.Module, reference: nn.Module, rank: int, size: int) -> None:
    """Give `module` its pieces of the parameters of `reference`, the same layers on one rank."""
    whole = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(cut(whole[name].detach(), annotation_of(parameter), rank, size))


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, the metric of docs ("One truth")."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
