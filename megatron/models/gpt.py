"""GPT: embedding, decoder, head; the model that `pretrain_gpt.py` trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.models.attention import SelfAttention, document_mask
from megatron.models.auxiliary import AuxiliaryLayer, AuxiliaryLosses
from megatron.models.block import (
    AttentionInputs,
    Block,
    BlockSpec,
    Decoder,
    HiddenDropout,
    LayerContext,
    build_norm,
    context_groups,
    layer_name,
)
from megatron.models.config import ModelConfig
from megatron.models.init import InitSpec
from megatron.models.mla import LatentAttention
from megatron.models.mlp import MLP
from megatron.models.moe.layer import MoELayer
from megatron.models.mtp import MultiTokenPrediction, PredictionLosses, PredictionTargets
from megatron.models.rope import rotary_table
from megatron.parallel.annotate import ParameterAnnotation, annotate, annotation_of
from megatron.parallel.context import Documents

if TYPE_CHECKING:
    from megatron.models.backends.base import Backend
    from megatron.parallel.mesh import ParallelMesh


class Embedding(nn.Module):
    """Token embeddings and learned positions: tokens [b, s] -> hidden states [s, b, hidden] (s / tp under
    SP).

    positions=False: tokens alone (rotary or no positions, and the head's copy on a pipeline's last stage).
    """

    def __init__(self, config: ModelConfig, backend: Backend, mesh: ParallelMesh, positions: bool) -> None:
        super().__init__()
        options = backend.options
        self.word_embeddings = backend.VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            num_padded_embeddings=config.padded_vocab_size,
            init_std=config.embedding_init_method_std,
        )
        self.position_embeddings: nn.Embedding | None = None
        if positions:
            shape = (config.max_position_embeddings, config.hidden_size)
            weight = torch.empty(shape, dtype=options.params_dtype, device=options.device)
            self.position_embeddings = nn.Embedding(*shape, _weight=weight)
            if options.sequence_parallel:  # each rank looks up its piece of the sequence
                annotate(self.position_embeddings.weight, ParameterAnnotation(replicated_gradient="sum"))
            self.position_embeddings.weight.init_spec = InitSpec("normal", config.embedding_init_method_std)
        self.dropout = HiddenDropout(config.hidden_dropout, backend)
        self._fp32 = config.fp32_residual_connection
        self._multiplier = 1.0 if config.variants.mup is None else config.variants.mup.embedding_mult
        self._context_size = mesh.size("cp")
        self._sequence_slice = (mesh.rank("tp"), mesh.size("tp")) if options.sequence_parallel else (0, 1)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """tokens, position_ids: [b, s] -> [s, b, hidden], [s / tp, b, hidden] under sequence parallelism."""
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            self._check_length(tokens)
            rank, size = self._sequence_slice
            hidden = hidden + self.position_embeddings(position_ids.t().chunk(size)[rank])
        if self._multiplier != 1.0:
            hidden = hidden * self._multiplier
        if self._fp32:
            hidden = hidden.float()
        return self.dropout(hidden)

    def _check_length(self, tokens: Tensor) -> None:
        assert self.position_embeddings is not None
        length, rows = tokens.shape[1] * self._context_size, self.position_embeddings.num_embeddings
        if length > rows:
            raise ValueError(
                f"a sequence of {length} tokens is longer than --max-position-embeddings {rows}: "
                "raise that or shorten the sequence (--seq-length)"
            )


@dataclass(frozen=True)
class StageParts:
    """What a pipeline stage has of a model; the default is all of it.

    Attributes:
        embedding: the embedding.
        head: the head, and the final norm unless `predicts` says otherwise.
        layers: global indices, from 0, of its layers; None: all.
        predicts: the final norm and the layers of multi-token prediction; None: where the head is.
    """

    embedding: bool = True
    head: bool = True
    layers: Iterable[int] | None = None
    predicts: bool | None = None


class GPTModel(nn.Module):
    """A decoder-only language model, or one pipeline stage of it.

    Parameters are named as in Megatron's checkpoints and start uninitialised: `megatron.models.init` fills
    them. A tied head shares its Parameter with the embedding; a last stage without the first keeps a copy
    under the embedding's name.

    Args:
        config: what the model is.
        backend: who builds its layers.
        mesh: the parallel axes.
        parts: what this stage has.

    Attributes:
        auxiliary: the losses beside the main one, of all layers (megatron/models/auxiliary.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        mesh: ParallelMesh,
        parts: StageParts = StageParts(),
    ) -> None:
        super().__init__()
        self.config = config
        self._embeds = parts.embedding
        self._mesh = mesh
        self._model_autocast, self._head_autocast = backend.model_autocast, partial(backend.autocast, None)
        _check_parallel(config, mesh)
        for kind in config.cp_comm_type:  # here, since all ranks must ask, whatever the layers of their stage
            context_groups(config, mesh, kind)
        self.auxiliary = AuxiliaryLosses(auxiliary_layers(config))
        tied = not config.untie_embeddings_and_output_weights
        predicts = config.mtp is not None and (parts.head if parts.predicts is None else parts.predicts)
        self.embedding: Embedding | None = None
        if parts.embedding or (parts.head and tied) or predicts:
            positions = parts.embedding and config.position_embedding_type == "learned_absolute"
            self.embedding = Embedding(config, backend, mesh, positions)
            if not parts.embedding:
                weight: Any = self.embedding.word_embeddings.weight
                annotate(weight, dataclasses.replace(annotation_of(weight), duplicate=True))
        indices = range(config.num_layers) if parts.layers is None else parts.layers
        contexts = [LayerContext(config, backend, mesh, index + 1, self.auxiliary) for index in indices]
        blocks = [Block(self.block_spec(context.layer_number - 1), context) for context in contexts]
        normalises = parts.head if config.mtp is None else predicts
        final_norm = build_norm(config, backend, config.hidden_size) if normalises else None
        self.decoder = Decoder(config, backend, blocks, final_norm)
        self.output_layer: nn.Module | None = None
        if parts.head:
            self.output_layer = self._build_head(backend)
        self.mtp: MultiTokenPrediction | None = None
        if predicts:
            context = LayerContext(config, backend, mesh, config.num_layers + 1, self.auxiliary)
            self.mtp = MultiTokenPrediction(self.block_spec(config.num_layers), context)
        self._prediction_losses: PredictionLosses | None = None
        if config.mtp is not None and parts.head:
            self._prediction_losses = PredictionLosses(config, mesh, self.auxiliary)

    def block_spec(self, layer_index: int) -> BlockSpec:
        """What the layer with this global index is made of."""
        latent = self.config.mla is not None
        experts = self.config.moe is not None and self.config.moe.has_experts(layer_index)
        alone = self.config.variants.residual_post_layernorm
        return BlockSpec(
            attention=LatentAttention if latent else SelfAttention,
            mlp=MoELayer if experts else MLP,
            input_layernorm=LayerContext.norm if latent or alone else None,
            pre_mlp_layernorm=LayerContext.norm if experts or alone else None,
        )

    def _build_head(self, backend: Backend) -> nn.Module:
        config = self.config
        head = backend.VocabParallelHead(
            config.hidden_size, config.padded_vocab_size, init_std=config.init_method_std
        )
        if not config.untie_embeddings_and_output_weights:
            assert self.embedding is not None
            head.weight = self.embedding.word_embeddings.weight
            self.register_state_dict_post_hook(_drop_tied_head)
            self.register_load_state_dict_pre_hook(_restore_tied_head)
        elif config.padded_vocab_size != config.vocab_size:
            weight: Any = head.weight
            annotate(weight, dataclasses.replace(annotation_of(weight), num_global_rows=config.vocab_size))
        return head

    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        hidden: Tensor | None = None,
        document_ids: Tensor | None = None,
        loss_mask: Tensor | None = None,
        predicted: Iterable[Tensor] = (),
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the stage.

        Args:
            tokens: [b, s] of this context-parallel rank; None where this stage has no embedding.
            position_ids: [b, s]; needed under context parallelism, whose slices are not contiguous, and by
                rotary positions on every stage. None on a stage with the embedding: 0..s-1.
            attention_mask: bool [b or 1, 1, s, s], True = masked out, instead of the causal mask: it must
                hold causality itself. Under context parallelism its rows are this rank's, its columns all.
            labels: [b, s] of this context-parallel rank.
            hidden: [s, b, hidden] from the previous stage, where this stage has no embedding.
            document_ids: [b, whole s], equal within a document: causal attention inside documents only.
            loss_mask: [b, s], for the losses of multi-token prediction; the main ones are not masked here.
            predicted: hidden states of each depth of multi-token prediction, where the previous stage has them.

        Returns the stage's hidden states [s, b, hidden], in training with those of each depth after them where this
        stage has multi-token prediction and not the head; on the last stage the fp32 loss of each token [b, s]
        if labels are given, else logits [b, s, padded vocabulary / tp] whose padding columns are -inf.
        """
        if self._embeds:
            assert self.embedding is not None and tokens is not None
            if position_ids is None:
                position_ids = self._default_positions(tokens)
            hidden = self.embedding(tokens, position_ids)
        assert hidden is not None, "a stage without the embedding needs the hidden states of the stage before"
        rotary = self._rotary(position_ids, hidden.dtype)
        inputs = self._attention_inputs(rotary, attention_mask, document_ids)
        with self._model_autocast():
            hidden = self.decoder(hidden, inputs)
            trains = self.training and torch.is_grad_enabled()
            if self.mtp is not None and trains:
                predicted = self._predict(self.mtp, hidden, tokens, position_ids, inputs)
            if self.output_layer is None:
                return (hidden, *predicted) if self.mtp is not None and trains else hidden
            if labels is None:
                return self._without_padding(self._head(hidden)).transpose(0, 1)
            losses = self._losses(hidden, labels)
            if self._prediction_losses is None or not trains:
                return losses
            targets = PredictionTargets(labels, loss_mask, document_ids)
            return self._prediction_losses.attach(losses, predicted, targets, self._losses)

    def _predict(
        self,
        mtp: MultiTokenPrediction,
        hidden: Tensor,
        tokens: Tensor | None,
        position_ids: Tensor | None,
        inputs: AttentionInputs,
    ) -> Iterable[Tensor]:
        assert self.embedding is not None and tokens is not None, "multi-token prediction needs the tokens"
        if position_ids is None:
            position_ids = self._default_positions(tokens)
        predicted: Iterable[Tensor] = mtp(hidden, tokens, position_ids, inputs, self.embedding)
        return predicted

    def _head(self, hidden: Tensor, **targets: Any) -> Tensor:
        assert self.output_layer is not None
        with self._head_autocast():
            return self.output_layer(self._for_head(hidden), **targets)

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses [b, s] of normalised hidden states."""
        real = self._num_real_columns(self.config.padded_vocab_size // self._mesh.size("tp"))
        losses: Tensor = self._head(hidden, labels=labels.t(), num_real=real)
        return losses.t().contiguous()

    def _for_head(self, hidden: Tensor) -> Tensor:
        """muP's factor of the logits, on what the head multiplies."""
        mup = self.config.variants.mup
        return hidden if mup is None else hidden * mup.logit_mult

    def _default_positions(self, tokens: Tensor) -> Tensor:
        if self._mesh.size("cp") > 1:
            raise ValueError(
                "position_ids are needed under context parallelism: a rank's tokens are not contiguous"
            )
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    def _rotary(self, position_ids: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        config = self.config
        if config.position_embedding_type != "rope":
            return None
        if position_ids is None:
            raise ValueError("rotary positions need position_ids on every pipeline stage")
        dtype = torch.promote_types(dtype, torch.float32)
        return rotary_table(config.rotary, config.rotary_dim, position_ids, dtype)

    def _attention_inputs(
        self, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None, document_ids: Tensor | None
    ) -> AttentionInputs:
        if document_ids is not None:
            if mask is not None:
                raise ValueError("give attention_mask or document_ids, not both")
            if self._mesh.size("cp") > 1:
                return AttentionInputs(rotary, documents=Documents.from_ids(document_ids))
            mask = document_mask(document_ids)
        return AttentionInputs(rotary, mask)

    def _num_real_columns(self, local: int) -> int:
        """Columns of this rank's logits that belong to the vocabulary; the rest are padding."""
        return max(0, min(local, self.config.vocab_size - self._mesh.rank("tp") * local))

    def _without_padding(self, logits: Tensor) -> Tensor:
        real = self._num_real_columns(logits.shape[-1])
        if real == logits.shape[-1]:
            return logits
        padding = torch.arange(logits.shape[-1], device=logits.device) >= real
        return logits.masked_fill(padding, float("-inf"))


def auxiliary_layers(config: ModelConfig) -> tuple[AuxiliaryLayer, ...]:
    """What the layers of the whole model report beside the main loss, the same on every pipeline stage."""
    predictions = 0 if config.mtp is None else config.mtp.num_layers
    layers = []
    for index in range(config.num_layers + predictions):
        built = config.mtp is None or index < config.num_layers + config.mtp.built_layers
        experts = config.moe if config.moe is not None and config.moe.has_experts(index) and built else None
        losses = () if experts is None else experts.loss_names
        if index >= config.num_layers:
            losses = (*losses, "mtp_loss")
        if experts is not None or losses:
            count = 0 if experts is None else experts.num_experts
            layers.append(AuxiliaryLayer(layer_name(config, index), losses, count))
    return tuple(layers)


def _check_parallel(config: ModelConfig, mesh: ParallelMesh) -> None:
    tp_size = mesh.size("tp")
    for flag, value in (
        ("--num-attention-heads", config.num_attention_heads),
        ("--ffn-hidden-size", config.ffn_hidden_size),
        ("padded vocabulary (--make-vocab-size-divisible-by)", config.padded_vocab_size),
    ):
        if value % tp_size:
            raise ValueError(f"{flag} {value} does not divide by --tensor-model-parallel-size {tp_size}")


def _drop_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Checkpoints hold a tied weight once, under the embedding's name."""
    state.pop(f"{prefix}output_layer.weight", None)


def _restore_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    source = f"{prefix}embedding.word_embeddings.weight"
    if source in state:
        state.setdefault(f"{prefix}output_layer.weight", state[source])
