"""The backend protocol: who builds the layers that models are made of.

Models call `backend.Linear(...)`, never a layer class, so the same model runs on plain torch (backends/torch)
and on Transformer Engine (backends/transformer_engine). Methods that build layers carry the names of
Transformer Engine's classes and constructor arguments, hence their many keywords; what is the same for all
layers of a model is given once as `LayerOptions`.

Note "What a layer returns" (as in Transformer Engine): `forward(x)` gives the output alone, or a tuple of
(output, bias if return_bias, normalised input if return_layernorm_output). A bias that is returned is not
added. With `return_bias=True` and `bias=False` the bias is None. Hidden states are [sequence, batch, hidden].

Note "Tensor parallelism": in_features and out_features are global. parallel_mode "column" cuts out_features
over tp (input: full features; under sequence parallelism this rank's piece of the sequence; output: local
features of the whole sequence), "row" cuts in_features (the reverse), None keeps the weight whole on every
rank. Expert layers (`expert=True`, GroupedLinear) cut over the expert-tensor axis and never communicate:
their dispatcher does.

Note "Parameters": every parameter carries a `parallel_annotation` (megatron/parallel/annotate.py) and an
`init_spec` (megatron/models/init.py), and may be built on device "meta".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from megatron.parallel.mesh import ParallelMesh
    from megatron.parallel.random import RngStreams


@dataclass(frozen=True)
class LayerOptions:
    """What is the same for every layer that a backend builds.

    Attributes:
        params_dtype: dtype of parameters as built (FSDP may keep another one for its main copy).
        device: where parameters are built; "meta" allocates nothing.
        tp_group: tensor-parallel group, None at size 1.
        tp_size: its size.
        sequence_parallel: activations between tensor-parallel layers are cut along the sequence over
            tp_group.
        expert_tp_size: size of the expert-tensor axis, which cuts expert layers.
        fuse_wgrad_accumulation: weight gradients go straight into main_grad (docs/main_grad_contract.md).
        delay_wgrad_compute: weight gradients wait for `module.backward_dw()`.
        rng: random streams per axis for dropout; None: torch's default generator only.
        seed: seed of the run, for backends that initialise on their own.
    """

    params_dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    tp_group: ProcessGroup | None = None
    tp_size: int = 1
    sequence_parallel: bool = False
    expert_tp_size: int = 1
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    rng: RngStreams | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.expert_tp_size < 1:
            raise ValueError(
                f"tp_size and expert_tp_size must be at least 1, got {self.tp_size}, {self.expert_tp_size}"
            )
        if self.tp_size > 1 and self.tp_group is None:
            raise ValueError(f"tp_size={self.tp_size} needs a tp_group (ParallelMesh.group('tp'))")

    @classmethod
    def from_mesh(
        cls, mesh: ParallelMesh, *, sequence_parallel: bool = False, **options: Any
    ) -> LayerOptions:
        """Options with the groups and sizes of `mesh`; sequence_parallel is off at tp 1."""
        tp_size = mesh.size("tp")
        return cls(
            tp_group=mesh.group("tp"),
            tp_size=tp_size,
            sequence_parallel=sequence_parallel and tp_size > 1,
            expert_tp_size=mesh.size("etp"),
            **options,
        )


class Backend(ABC):
    """Builds layers with Transformer Engine's names. Notes at the top of this module hold for all of them."""

    name: str

    def __init__(self, options: LayerOptions) -> None:
        self.options = options

    @abstractmethod
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
        """y = x W^T + b; parameters weight, bias. tensor_parallel_parts: see ParameterAnnotation (gated fc1:
        2).
        """

    @abstractmethod
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
        """Norm ("LayerNorm" or "RMSNorm"), then Linear; parameters layer_norm_weight, layer_norm_bias,
        weight, bias.
        """

    @abstractmethod
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
        """Norm, fc1, activation, fc2; parameters layer_norm_weight, layer_norm_bias, fc{1,2}_weight,
        fc{1,2}_bias.
        """

    @abstractmethod
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
        """num_gemms experts' Linears; parameters weight{i}, bias{i}.

        forward(x[tokens, in], m_splits): m_splits is a list of ints, tokens of each expert in order; their
        sum is the number of tokens and any may be 0.
        """

    @abstractmethod
    def LayerNorm(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        tensor_partial: bool = False,
    ) -> nn.Module:
        """Layer norm over the last dim; parameters weight, bias. tensor_partial: as for RMSNorm."""

    @abstractmethod
    def RMSNorm(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        tensor_partial: bool = False,
    ) -> nn.Module:
        """RMS norm over the last dim; parameter weight.

        tensor_partial: the layer sees only this tensor-parallel rank's heads (q/k norm), so that its gradient
        must be summed over tp even without sequence parallelism.
        """

    @abstractmethod
    def DotProductAttention(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        layer_number: int | None = None,
        cp_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = None,
        cp_comm_type: str = "p2p",
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
    ) -> nn.Module:
        """softmax(scale q k^T + mask) v. Heads and groups are global (divided by tp_size here, as in TE).

        cp_group: for cp_comm_type "a2a+p2p" two, of the all-to-all among neighbours and of the ring.
        kv_channels: head dim, or (of q and k, of v). softmax_scale None: 1/sqrt(head dim). window_size: tokens that
        a query sees before and after its own. softmax_type "off-by-one" or "learnable" (parameter softmax_offset
        [heads / tp]): the sum of exponentials has a further term, of 0 or of that number.
        attn_mask_type: "no_mask", "causal", "padding", "padding_causal" (attention_mask bool, True = masked
        out, [b, 1, 1, s] of the keys) or "arbitrary" (attention_mask [b or 1, 1, s_q, s_kv]).
        forward(query, key, value, attention_mask=None, *, attn_mask_type=None, qkv_format=None,
        cu_seqlens_q=None, document_ids=None) takes [s, b, heads, head_dim] ("sbhd"), [b, s, ...] ("bshd") or,
        for documents packed one after the other, [t, heads, head_dim] with cu_seqlens ("thd"); gives
        [s, b, heads * v_dim], [b, s, ...], [t, ...].
        """

    @abstractmethod
    def VocabParallelEmbedding(
        self, num_embeddings: int, embedding_dim: int, *, num_padded_embeddings: int, init_std: float = 0.02
    ) -> nn.Module:
        """Embedding cut over tp along the vocabulary; parameter weight [num_padded_embeddings / tp,
        embedding_dim].

        forward(tokens[b, s]) gives [s, b, embedding_dim]; under sequence parallelism this rank's piece of s.
        Rows from num_embeddings on are padding: zero, never updated.
        """

    @abstractmethod
    def autocast(self, recipe: str | None) -> AbstractContextManager[None]:
        """Context in which layers compute in a quantised recipe ("delayed", "tensorwise", ...; None: in their own
        dtype, also inside a `model_autocast`).
        """

    def model_autocast(self) -> AbstractContextManager[None]:
        """Context around one forward of a model or stage, for recipes whose state moves once a forward."""
        return nullcontext()

    def layer_recipe(self, layer_index: int, num_layers: int) -> str | None:
        """The recipe, for `autocast`, of the layer with this global index of a model with num_layers.

        Layers of multi-token prediction have indices from num_layers on.
        """
        return None

    def row_multiple(self, recipe: str | None) -> int:
        """What the rows of each expert of a GroupedLinear must be a multiple of under a recipe."""
        return 1

    @abstractmethod
    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args) with its activations recomputed in backward, random streams restored."""

    @abstractmethod
    def rng_tracker(self) -> RngStreams | None:
        """The random streams (LayerOptions.rng): `with tracker.fork(): dropout(...)`."""

    @abstractmethod
    def fused_adam(self) -> type[torch.optim.Optimizer] | None:
        """A faster Adam that comes with the backend, or None."""

    @abstractmethod
    def needs_backward_dw(self, module: nn.Module) -> bool:
        """True where `module.backward_dw()` must be called after backward (delayed weight gradients)."""

    def VocabParallelHead(self, in_features: int, out_features: int, *, init_std: float = 0.02) -> nn.Module:
        """Head cut over tp along the vocabulary; parameter weight [out_features / tp, in_features].

        forward(hidden, labels=None, num_real=None) gives this rank's logits, or with labels [s, b] the loss of each
        token [s, b] from its first num_real words, worked off in chunks (megatron/parallel/loss.py, note "Chunks").
        It is a layer of its own so that FSDP gathers its weight. The same for every backend.
        """
        from megatron.models.backends.torch.head import VocabParallelHead

        return VocabParallelHead(in_features, out_features, init_std=init_std, options=self.options)
