"""How the torch layers make a parameter: annotated, with an init_spec, on any device including "meta"."""

from __future__ import annotations

import math

import torch
from torch import nn

from megatron.models.backends.base import LayerOptions
from megatron.models.init import InitSpec
from megatron.parallel.annotate import ParameterAnnotation, annotate

ZEROS = InitSpec("zeros")
ONES = InitSpec("ones")
PARALLEL_MODES = (None, "column", "row")


def new_parameter(
    shape: tuple[int, ...], options: LayerOptions, spec: InitSpec, annotation: ParameterAnnotation
) -> nn.Parameter:
    """A parameter of the local `shape`; on a real device drawn from the default generator, for use on its
    own.

    Models are initialised again, alike in every layout, by megatron.models.init.
    """
    parameter = nn.Parameter(torch.empty(shape, dtype=options.params_dtype, device=options.device))
    annotate(parameter, annotation)
    parameter.init_spec = spec  # type: ignore[attr-defined]
    if not parameter.is_meta:
        _fill(parameter, spec)
    return parameter


@torch.no_grad()
def _fill(parameter: nn.Parameter, spec: InitSpec) -> None:
    if spec.kind == "normal":
        parameter.normal_(0.0, spec.std)
    elif spec.kind == "uniform":
        bound = math.sqrt(3.0) * spec.std
        parameter.uniform_(-bound, bound)
    else:
        parameter.fill_(1.0 if spec.kind == "ones" else 0.0)


def divide(value: int, size: int, what: str) -> int:
    """value / size; ValueError naming `what` where it does not divide."""
    if value % size:
        raise ValueError(f"{what}={value} does not divide by the tensor-parallel size {size}")
    return value // size


class Cut:
    """How parallel_mode cuts a weight [out, in] and its bias."""

    def __init__(self, mode: str | None, expert: bool, parts: int, name: str) -> None:
        if mode not in PARALLEL_MODES:
            raise ValueError(f"{name}: parallel_mode={mode!r}: choose one of {PARALLEL_MODES}")
        self.mode, self.expert, self.parts, self.name = mode, expert, parts, name

    def local_shape(self, in_features: int, out_features: int, options: LayerOptions) -> tuple[int, int]:
        """Shape of this rank's weight; ValueError where the cut dim does not divide."""
        size = options.expert_tp_size if self.expert else options.tp_size
        if self.mode == "column":
            return divide(
                out_features, size * self.parts, f"{self.name}: out_features"
            ) * self.parts, in_features
        if self.mode == "row":
            return out_features, divide(in_features, size, f"{self.name}: in_features")
        return out_features, in_features

    def weight_annotation(self, options: LayerOptions) -> ParameterAnnotation:
        """Annotation of the weight."""
        if self.mode == "column":
            return ParameterAnnotation(0, self.parts, expert=self.expert)
        if self.mode == "row":
            return ParameterAnnotation(1, expert=self.expert)
        return self._replicated(options)

    def bias_annotation(self, options: LayerOptions) -> ParameterAnnotation:
        """Annotation of the bias."""
        if self.mode == "column":
            return ParameterAnnotation(0, self.parts, expert=self.expert)
        return self._replicated(options)

    def _replicated(self, options: LayerOptions) -> ParameterAnnotation:
        partial = options.sequence_parallel and options.tp_size > 1 and not self.expert
        return ParameterAnnotation(replicated_gradient="sum" if partial else "none", expert=self.expert)
