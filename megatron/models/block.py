"""A transformer layer built from a spec, and the stack of layers that one pipeline stage owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.models.auxiliary import AuxiliaryLosses
from megatron.models.config import ModelConfig
from megatron.models.offload import offloading
from megatron.parallel.annotate import ParameterAnnotation, annotate
from megatron.parallel.recompute import DiscardedOutput

if TYPE_CHECKING:
    from megatron.models.backends.base import Backend
    from megatron.parallel.context import Documents
    from megatron.parallel.context.attention import Groups as ContextGroups
    from megatron.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class LayerContext:
    """What a builder of a layer's parts gets: the model, who makes layers, the mesh, the layer's number.

    Attributes:
        layer_number: from 1, in the whole model; those of multi-token prediction come after the last.
        auxiliary: takes the losses that a layer has of its own.
    """

    config: ModelConfig
    backend: Backend
    mesh: ParallelMesh
    layer_number: int
    auxiliary: AuxiliaryLosses = field(default_factory=lambda: AuxiliaryLosses(()))

    @property
    def layer_name(self) -> str:
        """The layer's name in reports: layer_{global index}, or mtp_{index}."""
        return layer_name(self.config, self.layer_number - 1)

    @property
    def recipe(self) -> str | None:
        """What the layer computes in (Backend.layer_recipe)."""
        return self.backend.layer_recipe(self.layer_number - 1, self.config.num_layers)

    @property
    def cp_comm_type(self) -> str:
        """How this layer's attention communicates over the context axis."""
        types = self.config.cp_comm_type
        return types[0] if len(types) == 1 else types[min(self.layer_number, self.config.num_layers) - 1]

    def linear_after_norm(self, in_features: int, out_features: int, **options: Any) -> nn.Module:
        """A linear layer that the input's norm is fused with; without it where the norm stands alone."""
        if self.config.variants.residual_post_layernorm:
            return self.backend.Linear(in_features, out_features, **options)
        return self.backend.LayerNormLinear(in_features, out_features, **self.config.norm_options, **options)

    @property
    def cp_group(self) -> ContextGroups:
        """The ranks that this layer's attention shares sequences with; a pair for a2a+p2p."""
        return context_groups(self.config, self.mesh, self.cp_comm_type)

    def norm(self) -> nn.Module:
        """A norm over hidden states that stands alone."""
        return build_norm(self.config, self.backend, self.config.hidden_size)

    def head_norm(self) -> nn.Module:
        """A norm over the channels of a head (q/k norm): a tensor-parallel rank sees its heads only."""
        module = build_norm(self.config, self.backend, self.config.kv_channels)
        if self.backend.options.tp_size > 1:
            for parameter in module.parameters():
                annotate(parameter, ParameterAnnotation(replicated_gradient="sum"))
        return module


def layer_name(config: ModelConfig, index: int) -> str:
    """Name in reports of the layer with this global index."""
    return f"layer_{index}" if index < config.num_layers else f"mtp_{index - config.num_layers}"


def context_groups(config: ModelConfig, mesh: ParallelMesh, kind: str) -> ContextGroups:
    """The context-parallel group or, for a2a+p2p, (of the all-to-all among neighbours, of the ring over the rest).

    Collective over the world at the first call for a2a+p2p (ParallelMesh.partition).
    """
    sizes, whole = config.hierarchical_context_parallel_sizes, mesh.group("cp")
    if kind != "a2a+p2p" or whole is None:
        return whole
    if sizes is None or len(sizes) != 2 or sizes[0] * sizes[1] != mesh.size("cp") or min(sizes) < 2:
        raise ValueError(
            f"--cp-comm-type a2a+p2p with --hierarchical-context-parallel-sizes {sizes}: give two sizes above 1 whose "
            f"product is --context-parallel-size {mesh.size('cp')}"
        )
    inner, outer = sizes
    neighbours = [range(first, first + inner) for first in range(0, inner * outer, inner)]
    alike = [range(first, inner * outer, inner) for first in range(inner)]
    groups = mesh.partition("cp", neighbours), mesh.partition("cp", alike)
    assert groups[0] is not None and groups[1] is not None
    return groups[0], groups[1]


def build_norm(config: ModelConfig, backend: Backend, size: int) -> nn.Module:
    """The config's norm over the last dim."""
    make = backend.RMSNorm if config.normalization == "RMSNorm" else backend.LayerNorm
    return make(size, eps=config.layernorm_epsilon, zero_centered_gamma=config.layernorm_zero_centered_gamma)


Builder = Callable[[LayerContext], nn.Module]


@dataclass(frozen=True)
class BlockSpec:
    """What a layer is made of.

    Attributes:
        attention: builds a module that is called as (hidden, AttentionInputs) -> hidden.
        mlp: builds a module that is called as hidden -> hidden; its attribute `recompute_name`, if any, is
            the word of ``--recompute-modules`` that covers it.
        input_layernorm: a norm before attention, where attention does not begin with a fused one.
        pre_mlp_layernorm: the same before the mlp.
    """

    attention: Builder
    mlp: Builder
    input_layernorm: Builder | None = None
    pre_mlp_layernorm: Builder | None = None


@dataclass(frozen=True)
class AttentionInputs:
    """What attention needs beside the hidden states, the same for all layers of a forward.

    Attributes:
        rotary: cosines and sines [s, b, 1, rotary_dim] of the tokens of this context-parallel rank; None
            without rotary positions.
        mask: bool, True = masked out, broadcast to [b, 1, s_q, s_kv]; None: causal.
        documents: causal attention inside these documents of the whole sequence, in place of a mask.
    """

    rotary: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    documents: Documents | None = None


class HiddenDropout(nn.Module):
    """Dropout of hidden states.

    Ranks of a tensor-parallel group hold the same hidden states and must drop the same ones: the common
    random stream. Under sequence parallelism they hold different tokens: the stream of this rank.
    """

    def __init__(self, probability: float, backend: Backend) -> None:
        super().__init__()
        self.probability = probability
        self._tracker = backend.rng_tracker() if backend.options.sequence_parallel else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        if not self.training or self.probability == 0.0:
            return hidden
        if self._tracker is None:
            return F.dropout(hidden, self.probability)
        with self._tracker.fork():
            return F.dropout(hidden, self.probability)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"p={self.probability}"


class Block(nn.Module):
    """One transformer layer: x = x + attention(x), then x = x + mlp(x), on hidden states [s, b, hidden].

    The residual stream keeps the dtype of its input (fp32 with ``--fp32-residual-connection``); the parts
    compute in the dtype of their weights. With ``--apply-residual-connection-post-layernorm`` it goes on from the
    norms' outputs.
    """

    def __init__(self, spec: BlockSpec, context: LayerContext) -> None:
        super().__init__()
        config, backend = context.config, context.backend
        self.layer_number = context.layer_number
        self._fp32_residual = config.fp32_residual_connection
        self._from_norm = config.variants.residual_post_layernorm
        self._autocast = partial(backend.autocast, context.recipe)
        self.input_layernorm = spec.input_layernorm(context) if spec.input_layernorm else None
        self.self_attention = spec.attention(context)
        self.pre_mlp_layernorm = spec.pre_mlp_layernorm(context) if spec.pre_mlp_layernorm else None
        self.mlp = spec.mlp(context)
        self.hidden_dropout = HiddenDropout(config.hidden_dropout, backend)
        # A residual stream that goes on from a norm's output needs that output.
        self._discards_norms = config.recompute.selects("layernorm") and not self._from_norm
        self._offload = config.offload
        recompute_name = getattr(self.mlp, "recompute_name", None)
        self._checkpoint_mlp = (
            backend.checkpoint if recompute_name and config.recompute.selects(recompute_name) else None
        )

    def forward(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """hidden: [s, b, hidden] (s / tp under sequence parallelism) -> the same shape and dtype."""
        with self._autocast():
            hidden = self._add(hidden, self.input_layernorm, lambda x: self._run_attention(x, inputs))
            return self._add(hidden, self.pre_mlp_layernorm, self._run_mlp)

    def _run_attention(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        with self._to_host("attention", self.self_attention):
            return self.self_attention(x, inputs)

    def _to_host(self, part: str, module: nn.Module) -> AbstractContextManager[Any]:
        covered = self._offload.covers(part, self.layer_number - 1)
        return offloading(module, self._offload.minimum_bytes) if covered else nullcontext()

    def _run_mlp(self, x: Tensor) -> Tensor:
        if self._checkpoint_mlp is not None:
            return self._checkpoint_mlp(self.mlp, x)
        with self._to_host("mlp", self.mlp):
            return self.mlp(x)

    def _add(self, hidden: Tensor, norm: nn.Module | None, part: Callable[[Tensor], Tensor]) -> Tensor:
        """hidden + dropout(part(norm(hidden))); norm None: it is fused into the part."""
        x = self._compute_input(hidden)
        discarded = DiscardedOutput() if self._discards_norms and norm is not None else None
        if norm is not None:
            x = norm(x) if discarded is None else discarded.call(norm, x)
        y = part(x)
        if discarded is not None:
            discarded.discard(y)
        residual = x.to(hidden.dtype) if self._from_norm else hidden
        return residual + self.hidden_dropout(y)

    def _compute_input(self, hidden: Tensor) -> Tensor:
        if not self._fp32_residual:
            return hidden
        # Asked at run time: a data-parallel wrapper may compute in another dtype than layers were built in.
        return hidden.to(next(self.self_attention.parameters()).dtype)


class Decoder(nn.Module):
    """The layers of one pipeline stage, named by global index, and the final norm where the stage has it."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        blocks: Sequence[Block],
        final_norm: nn.Module | None,
    ) -> None:
        super().__init__()
        # keyed by global index, so that no name depends on the pipeline layout
        self.layers = nn.ModuleDict({str(block.layer_number - 1): block for block in blocks})
        self.final_layernorm = final_norm
        self._fp32_residual = config.fp32_residual_connection
        self._recompute, self._checkpoint = config.recompute, backend.checkpoint

    def forward(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """hidden: [s, b, hidden] -> the same shape, through the final norm where there is one."""
        for blocks, recomputed in self._segments():
            if recomputed and torch.is_grad_enabled():
                hidden = self._checkpoint(_run_blocks, blocks, hidden, inputs)
            else:
                hidden = _run_blocks(blocks, hidden, inputs)
        if self.final_layernorm is None:
            return hidden
        if self._fp32_residual:
            hidden = hidden.to(next(self.final_layernorm.parameters()).dtype)
        return self.final_layernorm(hidden)

    def _segments(self) -> Iterator[tuple[list[nn.Module], bool]]:
        """Runs of layers, and whether each run is recomputed as one."""
        blocks = list(self.layers.values())
        count = self._recompute.num_layers
        if self._recompute.granularity != "full" or count is None:
            yield blocks, False
        elif self._recompute.method == "uniform":
            for start in range(0, len(blocks), count):
                yield blocks[start : start + count], True
        else:
            for block in blocks[:count]:
                yield [block], True
            yield blocks[count:], False


def _run_blocks(blocks: list[nn.Module], hidden: Tensor, inputs: AttentionInputs) -> Tensor:
    for block in blocks:
        hidden = block(hidden, inputs)
    return hidden
