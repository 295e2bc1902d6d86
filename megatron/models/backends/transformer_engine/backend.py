"""Backend that builds Transformer Engine's layers: same tree, names and meaning as the torch backend's.

Note "What is not TE's": the vocabulary embedding (TE has none) and, with `attention_backend="local"`,
attention are the torch backend's.

Note "Expert layers": TE's own tensor parallelism communicates; expert layers must not (their dispatcher
does), so they are built with their local sizes as if there were no tensor parallelism, and annotated as cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.models.backends.base import Backend, LayerOptions
from megatron.models.backends.torch import TorchBackend
from megatron.models.backends.torch.norm import norm_annotation
from megatron.models.backends.torch.parameters import ONES, ZEROS, Cut
from megatron.models.backends.transformer_engine import fp8
from megatron.models.backends.transformer_engine.annotations import Descriptions, describe
from megatron.models.backends.transformer_engine.attention import (
    ContextParallel,
    EngineAttention,
    communication_stream,
)
from megatron.models.backends.transformer_engine.capabilities import Capabilities, check_contract, probe
from megatron.models.backends.transformer_engine.loading import load_engine
from megatron.models.backends.transformer_engine.returns import without_bias
from megatron.models.backends.transformer_engine.rng import EngineRng
from megatron.models.backends.transformer_engine.settings import EngineSettings, describe_attention
from megatron.models.init import InitSpec
from megatron.parallel.annotate import ParameterAnnotation
from megatron.parallel.random import replaying

GATED_ACTIVATIONS = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class TransformerEngineBackend(fp8.QuantisedCompute, Backend):
    """Layers of transformer_engine.pytorch.

    Args:
        options: as for every backend. With fuse_wgrad_accumulation the installed TE is probed.
        settings: attention kernels and FP8.
        amax_group: ranks that share maxima under the delayed FP8 recipe; default: the tensor-parallel group.

    Raises ValueError where TE cannot be imported, cannot compute in params_dtype or in the FP8 recipe, or knows too
    little of the main_grad contract for fused wgrad.
    """

    name = "transformer_engine"

    def __init__(
        self,
        options: LayerOptions,
        settings: EngineSettings | None = None,
        amax_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(options)
        if options.params_dtype not in FLOATS:
            raise ValueError(
                f"--transformer-impl transformer_engine: it cannot compute in {options.params_dtype}; use "
                "--transformer-impl local"
            )
        self.settings = settings or EngineSettings()
        self._te = load_engine()
        self._torch = TorchBackend(options)
        self._amax_group = amax_group or options.tp_group
        self._recipe = fp8.make_recipe(self._te, self.settings.fp8)
        if options.fuse_wgrad_accumulation or options.delay_wgrad_compute:
            check_contract(self.capabilities, options)

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the installed TE knows of the main_grad contract."""
        return probe("cuda" if torch.cuda.is_available() else "cpu")

    def describe(self) -> str:
        """Lines that a run prints about its choice of kernels."""
        quantised = [] if self.settings.fp8 is None else [self.settings.fp8.describe()]
        return "\n".join([describe_attention(self.settings.attention_backend), *quantised])

    def Linear(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        init_std: float = 0.02,
        tensor_parallel_parts: int = 1,
        expert: bool = False,
        name: str = "",
    ) -> nn.Module:
        """See Backend.Linear."""
        cut = Cut(parallel_mode, expert, tensor_parallel_parts, name or "Linear")
        module = self._te.Linear(
            *self._sizes(cut, in_features, out_features),
            bias=bias,
            return_bias=return_bias and bias,
            **self._parallel(cut),
            **self._common(init_std),
        )
        describe(module, self._linear_descriptions(cut, init_std))
        return without_bias(module, return_bias and not bias)

    def LayerNormLinear(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        bias: bool = True,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        parallel_mode: str | None = None,
        init_std: float = 0.02,
        tensor_parallel_parts: int = 1,
        name: str = "",
    ) -> nn.Module:
        """See Backend.LayerNormLinear."""
        if parallel_mode == "row":
            raise ValueError("LayerNormLinear: parallel_mode='row' would normalise a piece of the features")
        cut = Cut(parallel_mode, False, tensor_parallel_parts, name or "LayerNormLinear")
        module = self._te.LayerNormLinear(
            *self._sizes(cut, in_features, out_features),
            eps=eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            bias=bias,
            return_bias=return_bias and bias,
            return_layernorm_output=return_layernorm_output,
            **self._parallel(cut),
            **self._common(init_std),
        )
        norm = self._norm_descriptions("layer_norm_", zero_centered_gamma)
        describe(module, {**norm, **self._linear_descriptions(cut, init_std)})
        return without_bias(module, return_bias and not bias)

    def LayerNormMLP(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        bias: bool = True,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        set_parallel_mode: bool = True,
        init_std: float = 0.02,
        output_init_std: float = 0.02,
        name: str = "",
    ) -> nn.Module:
        """See Backend.LayerNormMLP."""
        parts = 2 if activation in GATED_ACTIVATIONS else 1
        first = Cut("column" if set_parallel_mode else None, False, parts, name or "LayerNormMLP")
        second = Cut("row" if set_parallel_mode else None, False, 1, name or "LayerNormMLP")
        self._sizes(first, hidden_size, parts * ffn_hidden_size)
        parallel = self._parallel(first)
        del parallel["parallel_mode"]
        module = self._te.LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            activation=activation,
            bias=bias,
            return_bias=return_bias and bias,
            return_layernorm_output=return_layernorm_output,
            set_parallel_mode=set_parallel_mode,
            output_layer_init_method=_normal(output_init_std),
            **parallel,
            **self._common(init_std),
        )
        descriptions = {
            **self._norm_descriptions("layer_norm_", zero_centered_gamma),
            **self._linear_descriptions(first, init_std, "fc1_"),
            **self._linear_descriptions(second, output_init_std, "fc2_"),
        }
        describe(module, descriptions)
        return without_bias(module, return_bias and not bias)

    def GroupedLinear(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        init_std: float = 0.02,
        tensor_parallel_parts: int = 1,
        name: str = "",
    ) -> nn.Module:
        """See Backend.GroupedLinear.

        Raises ValueError for delayed wgrad without fusion: TE 2.20 then gives autograd uninitialised gradients.
        """
        if self.options.delay_wgrad_compute and not self.options.fuse_wgrad_accumulation:
            raise ValueError(
                "Transformer Engine's GroupedLinear delays weight gradients only with fused ones"
            )
        cut = Cut(parallel_mode, True, tensor_parallel_parts, name or "GroupedLinear")
        module = self._te.GroupedLinear(
            num_gemms,
            *self._sizes(cut, in_features, out_features),
            bias=bias,
            return_bias=return_bias and bias,
            **self._parallel(cut),
            **self._common(init_std),
        )
        weight, bias_description = self._linear_descriptions(cut, init_std).values()
        descriptions = {f"weight{i}": weight for i in range(num_gemms)}
        descriptions.update({f"bias{i}": bias_description for i in range(num_gemms)})
        describe(module, descriptions)
        return without_bias(module, return_bias and not bias)

    def LayerNorm(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        tensor_partial: bool = False,
    ) -> nn.Module:
        """See Backend.LayerNorm."""
        return self._norm(self._te.LayerNorm, hidden_size, eps, zero_centered_gamma, tensor_partial)

    def RMSNorm(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        tensor_partial: bool = False,
    ) -> nn.Module:
        """See Backend.RMSNorm."""
        return self._norm(self._te.RMSNorm, hidden_size, eps, zero_centered_gamma, tensor_partial)

    def DotProductAttention(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        cp_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        cp_comm_type: str = "p2p",
        **arguments: Any,
    ) -> nn.Module:
        """See Backend.DotProductAttention."""
        if self.settings.attention_backend == "local":
            return self._torch.DotProductAttention(
                num_attention_heads, kv_channels, cp_group=cp_group, cp_comm_type=cp_comm_type, **arguments
            )
        context_parallel = self._context_parallel(cp_group, cp_comm_type)
        rng = self.options.rng
        core = self._te.DotProductAttention(
            num_attention_heads,
            kv_channels,
            tp_size=self.options.tp_size,
            tp_group=self.options.tp_group,
            get_rng_state_tracker=None if rng is None else partial(EngineRng, rng),
            **arguments,
        )
        cut = ParameterAnnotation(tensor_parallel_dim=0 if self.options.tp_size > 1 else None)
        offset = {"core.softmax_offset": (ZEROS, cut)} if arguments.get("softmax_type") == "learnable" else {}
        return describe(EngineAttention(core, context_parallel), offset)

    def _context_parallel(
        self, group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None, comm_type: str
    ) -> ContextParallel | None:
        if group is None:
            return None
        if not torch.cuda.is_available():
            raise ValueError(
                "--context-parallel-size > 1: Transformer Engine's context parallelism needs a CUDA device; "
                "use --attention-backend local or --transformer-impl local"
            )
        return ContextParallel(group, comm_type, self._context_parallel_stream)

    @cached_property
    def _context_parallel_stream(self) -> Any:
        return communication_stream()

    def VocabParallelEmbedding(
        self, num_embeddings: int, embedding_dim: int, *, num_padded_embeddings: int, init_std: float = 0.02
    ) -> nn.Module:
        """See Backend.VocabParallelEmbedding; the torch backend's."""
        return self._torch.VocabParallelEmbedding(
            num_embeddings, embedding_dim, num_padded_embeddings=num_padded_embeddings, init_std=init_std
        )

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """TE's recompute, which also keeps forward's FP8 scales for the second run."""
        return self._te.checkpoint(replaying(function, self.options.rng), *args, use_reentrant=False)

    def rng_tracker(self) -> Any:
        """See Backend.rng_tracker."""
        return self.options.rng

    def fused_adam(self) -> type[torch.optim.Optimizer] | None:
        """TE's FusedAdam on CUDA; None on CPU."""
        return self._te.optimizers.FusedAdam if torch.cuda.is_available() else None

    def needs_backward_dw(self, module: nn.Module) -> bool:
        """See Backend.needs_backward_dw. Asked of the module: a flag on the weight is lost by tying."""
        store = getattr(module, "wgrad_store", None)
        return store is not None and bool(store.delay_wgrad_compute())

    def _common(self, init_std: float) -> dict[str, Any]:
        options = self.options
        return {
            "params_dtype": options.params_dtype,
            "device": options.device,
            "init_method": _normal(init_std),
            "fuse_wgrad_accumulation": options.fuse_wgrad_accumulation,
            "delay_wgrad_compute": options.delay_wgrad_compute,
        }

    def _parallel(self, cut: Cut) -> dict[str, Any]:
        """TE's constructor arguments for a cut; see note "Expert layers"."""
        if cut.expert or cut.mode is None:
            return {"parallel_mode": None, "tp_group": None, "tp_size": 1, "sequence_parallel": False}
        options = self.options
        return {
            "parallel_mode": cut.mode,
            "tp_group": options.tp_group,
            "tp_size": options.tp_size,
            "sequence_parallel": options.sequence_parallel,
        }

    def _sizes(self, cut: Cut, in_features: int, out_features: int) -> tuple[int, int]:
        """(in, out) for TE's constructor. Raises ValueError where the cut does not divide."""
        local_out, local_in = cut.local_shape(in_features, out_features, self.options)
        return (local_in, local_out) if cut.expert else (in_features, out_features)

    def _linear_descriptions(self, cut: Cut, init_std: float, prefix: str = "") -> Descriptions:
        return {
            f"{prefix}weight": (InitSpec("normal", init_std), cut.weight_annotation(self.options)),
            f"{prefix}bias": (ZEROS, cut.bias_annotation(self.options)),
        }

    def _norm_descriptions(
        self, prefix: str, zero_centered_gamma: bool, tensor_partial: bool = False
    ) -> Descriptions:
        annotation = norm_annotation(self.options, tensor_partial)
        gamma = ZEROS if zero_centered_gamma else ONES
        return {f"{prefix}weight": (gamma, annotation), f"{prefix}bias": (ZEROS, annotation)}

    def _norm(
        self, kind: Any, hidden_size: int, eps: float, zero_centered_gamma: bool, tensor_partial: bool
    ) -> nn.Module:
        module = kind(
            hidden_size,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            sequence_parallel=self.options.sequence_parallel,
            device=self.options.device,
            dtype=self.options.params_dtype,
        )
        return describe(module, self._norm_descriptions("", zero_centered_gamma, tensor_partial))


def _normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return partial(nn.init.normal_, mean=0.0, std=std)
