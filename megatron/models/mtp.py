"""Multi-token prediction: layer k predicts the token k + 2 places on.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.2. Each layer joins the hidden states of the depth before
with the embeddings of the tokens one further, runs a transformer layer and a norm, and shares embedding and head with
the model. The first takes the hidden states after the model's final norm, as Megatron's does.

Note "Its own mean". A depth's loss is the mean over its own valid tokens (the last k + 1 of a sequence have none to
predict) of the microbatch, over context ranks; the weighted mean over depths is added to the microbatch's loss.

Note "Two places". The layers run after the final norm, the losses where the head is: the next pipeline stage, perhaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.models.block import AttentionInputs, Block, BlockSpec, LayerContext, layer_name
from megatron.models.mlp import set_weight_init
from megatron.parallel.collectives import launch_all_reduce
from megatron.parallel.context.balance import zigzag_indices
from megatron.parallel.context.roll import roll_left

if TYPE_CHECKING:
    from megatron.models.auxiliary import AuxiliaryLosses
    from megatron.models.config import ModelConfig
    from megatron.parallel.mesh import ParallelMesh


class PredictionLayer(nn.Module):
    """One depth: enorm, hnorm, eh_proj [hidden, 2 hidden] of [embedding; hidden states], transformer_layer, norm."""

    def __init__(self, spec: BlockSpec, context: LayerContext) -> None:
        super().__init__()
        hidden = context.config.hidden_size
        self._autocast = partial(context.backend.autocast, context.recipe)
        self.enorm, self.hnorm = context.norm(), context.norm()
        self.eh_proj = context.backend.Linear(
            2 * hidden, hidden, bias=False, parallel_mode=None, name=f"{context.layer_name}.eh_proj"
        )
        set_weight_init(self.eh_proj, context.config.linear_init(2 * hidden, hidden))
        self.transformer_layer = Block(spec, context)
        self.final_layernorm = context.norm()

    def forward(self, embedded: Tensor, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        """embedded, hidden: [s, b, hidden] (s / tp under sequence parallelism) -> the same shape."""
        dtype = next(self.eh_proj.parameters()).dtype
        joined = torch.cat((self.enorm(embedded.to(dtype)), self.hnorm(hidden.to(dtype))), dim=-1)
        with self._autocast():
            joined = self.eh_proj(joined)
        return self.final_layernorm(self.transformer_layer(joined, inputs).to(dtype))


@dataclass(frozen=True)
class PredictionTargets:
    """The microbatch of this context rank: labels [b, s] and loss_mask [b, s] or None (all are valid).

    document_ids: [b, whole s], equal within a document, which no prediction leaves; None: one document.
    """

    labels: Tensor
    loss_mask: Tensor | None
    document_ids: Tensor | None = None


class MultiTokenPrediction(nn.Module):
    """All depths of a model."""

    def __init__(self, spec: BlockSpec, context: LayerContext) -> None:
        super().__init__()
        config = context.config
        assert config.mtp is not None, "multi-token prediction needs ModelConfig.mtp"
        self._mtp = config.mtp
        numbers = range(config.num_layers + 1, config.num_layers + config.mtp.built_layers + 1)
        contexts = [
            LayerContext(config, context.backend, context.mesh, number, context.auxiliary)
            for number in numbers
        ]
        self.layers = nn.ModuleList([PredictionLayer(spec, each) for each in contexts])
        recompute = config.recompute
        whole = recompute.granularity == "full" and recompute.method == "uniform"
        self._checkpoint = context.backend.checkpoint if whole else None
        self._mesh: ParallelMesh = context.mesh

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        position_ids: Tensor,
        inputs: AttentionInputs,
        embed: Callable[[Tensor, Tensor], Tensor],
    ) -> Iterator[Tensor]:
        """Hidden states after the norm of each depth [s, b, hidden], each computed when it is asked for.

        hidden: after the final norm. tokens, position_ids: [b, s]. embed: (tokens, position_ids) -> hidden states.
        """
        if self._mtp.detach_heads:
            hidden = hidden.detach()
        for depth in range(self._mtp.num_layers):
            layer = self.layers[min(depth, len(self.layers) - 1)]
            tokens = roll_left(tokens.contiguous(), 1, self._mesh.group("cp"))
            embedded = embed(tokens, position_ids)
            if self._checkpoint is None:
                hidden = layer(embedded, hidden, inputs)
            else:
                hidden = self._checkpoint(layer, embedded, hidden, inputs)
            yield hidden


class PredictionLosses:
    """The depths' losses (note "Its own mean"), where the head is."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, auxiliary: AuxiliaryLosses) -> None:
        assert config.mtp is not None, "multi-token prediction needs ModelConfig.mtp"
        self._config, self._mtp = config, config.mtp
        self._mesh, self._auxiliary = mesh, auxiliary

    def attach(
        self,
        main_losses: Tensor,
        predicted: Iterable[Tensor],
        targets: PredictionTargets,
        losses_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Attach the depths' losses to `main_losses` [b, s] and return those.

        predicted: of `MultiTokenPrediction`. losses_of: (hidden states after a norm, labels [b, s]) -> losses [b, s].
        """
        group = self._mesh.group("cp")
        labels, mask = targets.labels, targets.loss_mask
        valid = torch.ones_like(labels, dtype=torch.float32) if mask is None else mask.float()
        weight = self._mtp.loss_scaling_factor / self._mtp.num_layers
        for depth, hidden in enumerate(predicted):
            labels, valid = (roll_left(x.contiguous(), 1, group) for x in (labels, valid))
            losses = losses_of(hidden, labels)
            counted_here = valid * self._same_document(targets.document_ids, depth + 1)
            count = launch_all_reduce(counted_here.sum(), group).wait().clamp(min=1.0)
            value = (losses * counted_here).sum() / count
            name = layer_name(self._config, self._config.num_layers + depth)
            counted = self._mesh.rank("tp") == 0
            main_losses = self._auxiliary.attach(
                main_losses, name, {"mtp_loss": (value, weight)}, counted=counted
            )
        return main_losses

    def _same_document(self, ids: Tensor | None, ahead: int) -> Tensor | float:
        """1.0 where the token `ahead` of this rank's is of the same document, else 0.0: [b, s]."""
        if ids is None:
            return 1.0
        same = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        same[:, :-ahead] = (ids[:, ahead:] == ids[:, :-ahead]).float()
        cp = self._mesh.size("cp")
        return (
            same if cp == 1 else same[:, zigzag_indices(ids.shape[1], cp, self._mesh.rank("cp"), ids.device)]
        )
